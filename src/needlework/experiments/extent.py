"""How much a plan would run, counted before any of it is made; what is beyond the stated sizes is refused."""

from __future__ import annotations

from needlework.experiments.plan import Experiment

# All samples of a model are made before its first trial starts, and each of their tokens takes about 36 bytes until it ends.
MOST_SAMPLES = 250_000
MOST_TRIALS = 5_000_000
MOST_PROMPT_TOKENS = 1_000_000_000
_CURE = "take fewer seeds, samples, lengths or interventions, or part it into several plans with directories of their own"


class Extent:
    """What the experiments of a plan make for one model, so far."""

    def __init__(self) -> None:
        self.samples = self.trials = self.tokens = 0

    def add(self, experiment: Experiment, model: str, conditions: int) -> None:
        """Count one experiment; raises where it would be too much."""
        for named in experiment.tasks:
            each = named.task.extent()
            if each is None:  # a task that cannot say: its samples are counted while they are made
                continue
            samples = each.samples * len(experiment.seeds)
            self.samples += samples
            self.trials += samples * conditions
            self.tokens += samples * each.tokens
            for count, most, what in (
                (self.samples, MOST_SAMPLES, "samples"),
                (self.trials, MOST_TRIALS, "trials"),
                (self.tokens, MOST_PROMPT_TOKENS, "tokens of prompts"),
            ):
                if count > most:
                    raise named.error(f"for {model}, the plan makes {count:,} {what}; the most is {most:,}: {_CURE}")
