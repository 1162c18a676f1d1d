"""Which trials are asked together: what a prompt's interventions share is read once. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from needlework.experiments.trials import Trial, Work, decoding

_STEM_PART = 8  # a beginning costs at most this part of its chunk, unless the chunk would grow too large


def chunks(work: Work, most_trials: int, most_flops: float, enough_trials: int, enough_flops: float) -> Iterator[list[Trial]]:
    """Trials that are asked together, each answer once: all interventions of a prompt, prompts of like length side by side.

    What a chunk holds depends on the plan alone, never on what is already done. A resumed run asks an unfinished chunk
    again as a whole, so that the same questions share a batch and every number comes out as in an uninterrupted run.
    A chunk never grows beyond the two `most`, and not beyond both of the two `enough`; but a beginning that samples share is read
    once in every chunk, so that with one a chunk is not enough before it has cost a small part of it.
    """
    prompts: dict[tuple[str, str], list[Trial]] = {}
    for same in work.by_id().values():
        trial = same[0]
        how = decoding(trial.mode, trial.max_new_tokens, trial.boundary, trial.stop)
        prompts.setdefault((how, trial.prompt_id), []).append(trial)
    order = sorted(prompts.values(), key=lambda group: (group[0].mode, group[0].item.stem, len(group[0].item.prompt)))
    begins = _beginnings(order)
    batch: list[Trial] = []
    flops = of_stem = 0.0  # of the batch; and in it, of what its newest samples begin with
    for group in order:
        stem, each = group[0].item.stem, len(group) * 2.0 * work.model.anatomy.parameters
        again = bool(batch) and batch[-1].item.stem == stem
        cost = each * (group[0].tokens - (begins[stem] if again else 0))
        other = bool(batch) and batch[0].mode != group[0].mode  # generating and scoring are two passes
        large = len(batch) + len(group) > most_trials or flops + cost > most_flops
        enough = len(batch) >= enough_trials and flops + cost > enough_flops
        if batch and (other or large or (enough and not (again and of_stem * _STEM_PART > flops))):
            yield batch
            batch, flops, again = [], 0.0, False
            cost = each * group[0].tokens
        batch += group
        flops += cost
        of_stem = of_stem if again else each * begins[stem]
    if batch:
        yield batch


def _beginnings(order: Sequence[Sequence[Trial]]) -> dict[str, int]:
    """How many tokens the samples of each stem begin with alike; none without a stem."""
    prompts: dict[str, list[tuple[int, ...]]] = {}
    for group in order:
        prompts.setdefault(group[0].item.stem, []).append(group[0].item.prompt)
    edges = {stem: (min(some), max(some)) for stem, some in prompts.items()}  # what these two begin with, all others do
    return {
        stem: sum(1 for _ in takewhile(lambda ab: ab[0] == ab[1], zip(*two, strict=False))) * bool(stem)
        for stem, two in edges.items()
    }
