"""About how long answers take: estimates before a run, and the weights of its progress, which are scaled by what is measured."""

from __future__ import annotations

from collections import Counter

from needlework.experiments.trials import Trial, Work

# Seen on two CPU cores; a guess for anything else. A decode step moves few rows through the same weights, so it is slower.
FLOPS = {"prefill": 4e10, "decode": 1.5e10}
TRIAL_SECONDS = 0.002  # preparing, scoring and writing


def reading_seconds(work: Work, tokens: float) -> float:
    return 2 * work.model.anatomy.parameters * tokens / FLOPS["prefill"]


def answer_seconds(work: Work, steps: float) -> float:
    return 2 * work.model.anatomy.parameters * steps / FLOPS["decode"]


def weights(work: Work) -> dict[str, float]:
    """Estimated seconds of every answer, by trial id. The reading of a prompt is parted among those that share it."""
    asked = {name: same[0] for name, same in work.by_id().items()}
    sizes: dict[tuple[str, str, int], tuple[int, int]] = {}
    for trial in asked.values():
        key = _form(trial)
        if key not in sizes:
            prompt = sum(len(item.prompt) for item in (trial.item, *trial.item.also))
            sizes[key] = prompt, max(0, trial.tokens - prompt)
    readings = {
        name: (*_form(trial), *(str(p) for p in trial.intervention.parts if p.phase != "decode")) for name, trial in asked.items()
    }
    readers = Counter(readings.values())
    made = {}
    for name, trial in asked.items():
        prompt, steps = sizes[_form(trial)]
        reading = reading_seconds(work, prompt) / readers[readings[name]]
        made[name] = reading + answer_seconds(work, steps) + TRIAL_SECONDS
    return made


def _form(trial: Trial) -> tuple[str, str, int]:
    return trial.prompt_id, trial.mode, trial.max_new_tokens
