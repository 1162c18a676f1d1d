"""Compare models with a base model: paired differences for every claim, and what became of the best heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from needlework import stats
from needlework.analysis.conditions import EXPOSURES, FEW_HEADS
from needlework.analysis.evidence import NO_CONTEXT
from needlework.analysis.frame import Frame, Ints
from needlework.analysis.model_trials import ModelTrials, by_boundary
from needlework.analysis.verdicts import Verdict
from needlework.errors import NeedleworkError
from needlework.stats import Estimate
from needlework.tables import Table

OMIT = EXPOSURES[1]
MOST_CHANGES = 8  # rows of a table of what changed
Difference = tuple[str, str, Estimate, Estimate, Estimate]  # claim, label, share of the base and of the other, difference


def pair_models(frame: Frame, against: str | Path) -> None:
    """Set `frame.families` to the models that are compared, each with its base first.

    Args:
        against: The directory of one of the runs, or the name of a model.

    Raises:
        NeedleworkError: There is no such run or model, or nothing to compare it with.
    """
    directories = [Path(directory).resolve() for directory in frame.directories]
    labels = list(frame.models)
    if str(against) in labels:
        bases = [str(against)]
    elif Path(against).resolve() in directories:
        source = directories.index(Path(against).resolve())
        groups = frame.data["group"][frame.data["source"] == source].unique()
        bases = [label for label in labels if label in set(frame.groups["model"].iloc[groups])]
    else:
        raise NeedleworkError(f"--against {against} is neither one of these runs nor a model in them: {', '.join(labels)}")
    others = [label for label in labels if label not in bases]
    related = {base: [o for o in others if any({base, o} <= set(f) for f in frame.families)] for base in bases}
    if len(bases) == 1:
        related = {bases[0]: others}
    frame.families = [[base, *found] for base, found in related.items() if found]
    if not frame.families:
        raise NeedleworkError(f"nothing to compare with {against}: these runs hold no other model of the same name or layers")
    families = frame.families
    frame.families = [[base, *(o for o in found if _differences(frame, base, o))] for base, *found in families]
    apart = [(base, o) for (base, *found), kept in zip(families, frame.families, strict=True) for o in found if o not in kept]
    frame.families = [family for family in frame.families if len(family) > 1]
    if not frame.families:
        raise NeedleworkError("{1} and {0} answered no sample in common: run the same plan on both".format(*apart[0]))
    frame.notes.extend(f"{other} and {base} answered no sample in common and are not compared." for base, other in apart)


def _conditions(trials: ModelTrials) -> list[tuple[str, str, str | None]]:
    """Return (claim, what was done, intervention) of the numbers that the rules read; None where it was not run."""
    few, off, recurrent = trials.few_heads(), trials.heads_off(), trials.recurrent_off()
    reading = trials.heads_off("prefill")
    exposed = trials.text_by_place(((c.prefill, c.decode), c) for c in trials.conditions_of("expose"))
    return [
        ("", "untouched", "none"),
        ("segregation", "no heads", off.text if off else None),
        ("few_heads", f"about {stats.percent(FEW_HEADS)} of the heads", few.text if few else None),
        ("exposure", "needle hidden while answering", exposed.get(("keep", OMIT))),
        ("context", "heads off while reading", reading.text if reading else None),
        ("context", "no context in either phase", trials.text_of(NO_CONTEXT)),
        ("double_dissociation", "recurrent side off", recurrent.text if recurrent else None),
        *(("", label, text) for label, text in trials.unplaced),
    ]


def _differences(frame: Frame, base: str, other: str) -> list[Difference]:
    """Return (claim, label, base's share, the other's, their paired difference) where both answered the same samples."""
    found: list[Difference] = []
    before, after = by_boundary(frame, base)[0], by_boundary(frame, other)[0]
    texts = {label: text for _, label, text in _conditions(after)}
    for claim, label, text in _conditions(before):
        if text is None or (other_text := texts.get(label)) is None:
            continue
        pairs: list[tuple[str, Ints, Ints]] = [("retrieval", before.retrieval(text), after.retrieval(other_text))]
        pairs += [(form, before.knowledge(text, form), after.knowledge(other_text, form)) for form in before.forms()]
        if claim == "segregation":
            choices = (before.retrieval(text, "choices"), after.retrieval(other_text, "choices"))
            pairs.append(("forced choice", *choices))
        found += [(claim, f"{label}: {what}", *_paired(before, a, b)) for what, a, b in pairs if len(a) and len(b)]
    for layout, words in (("jrt", "read twice"), ("question_first", "question first")):
        off = [trials.heads_off() for trials in (before, after)]
        rows = [t.retrieval(c.text, layout=layout) for t, c in zip((before, after), off, strict=True) if c]
        if len(rows) == 2 and all(map(len, rows)):
            found.append(("no_rescue", f"no heads, {words}: retrieval", *_paired(before, rows[0], rows[1])))
    for half in ("kv", "recurrent"):
        rows = [trials.swapped(half, in_window=True) for trials in (before, after)]
        if all(map(len, rows)):
            found.append(("memory", f"{half} half swapped: own answer", *_paired(before, rows[0], rows[1])))
    return [row for row in found if row[-1].n]


def _paired(trials: ModelTrials, a: Ints, b: Ints) -> tuple[Estimate, Estimate, Estimate]:
    """Return both accuracies on the samples that are common, and the paired difference b - a."""
    pairs = trials.pairs(b, a)
    shares = stats.accuracy(pairs.before), stats.accuracy(pairs.after)
    return *shares, stats.gain(pairs.after, pairs.before, pairs.clusters)


def _compared(frame: Frame) -> Iterator[tuple[str, str, list[Difference]]]:
    """Yield (base, other model, their differences)."""
    for base, *others in frame.families:
        for other in others:
            yield base, other, _differences(frame, base, other)


def _sure(gaps: Sequence[Difference]) -> list[Difference]:
    """Return the differences whose interval excludes 0, largest first."""
    sure = [row for row in gaps if row[-1].high < 0 or row[-1].low > 0]
    return sorted(sure, key=lambda row: -abs(row[-1].value))


def claim_tables(frame: Frame, judged: Sequence[Verdict]) -> list[Table]:
    """Return one table per compared model: shares of both, the paired difference, and both verdicts."""
    return [_difference_table(*pair, judged, f"{pair[1]} against {pair[0]}") for pair in _compared(frame)]


def change_tables(frame: Frame, judged: Sequence[Verdict]) -> list[Table]:
    """Return the rows of `claim_tables` whose interval excludes 0, largest first; no table for a model without any."""
    tables = []
    for base, other, gaps in _compared(frame):
        if sure := _sure(gaps):
            shown = f", the {MOST_CHANGES} largest" if len(sure) > MOST_CHANGES else ""
            caption = f"{other} against {base}: {len(sure)} of {len(gaps)} differences exclude 0{shown}"
            tables.append(_difference_table(base, other, sure[:MOST_CHANGES], judged, caption))
    return tables


def _difference_table(base: str, other: str, gaps: Sequence[Difference], judged: Sequence[Verdict], caption: str) -> Table:
    words = {(v.model, v.claim): v.word for v in judged}
    rows = []
    for claim, label, a, b, gap in gaps:
        was, now = words.get((base, claim), ""), words.get((other, claim), "")
        rows.append([label, points(gap), a.text(), b.text(), was if was == now else f"{was} → {now}"])
    return Table(["", "difference, points", base, other, "verdict"], rows, caption)


def records(frame: Frame) -> list[dict[str, Any]]:
    """Return every paired difference as JSON values."""
    found = []
    for base, other, gaps in _compared(frame):
        for claim, label, *estimates in gaps:
            shares = dict(zip(("base_share", "share", "difference"), (e.to_dict() for e in estimates), strict=True))
            found.append({"model": other, "base": base, "claim": claim, "what": label, **shares})
    return found


def headline(frame: Frame) -> str:
    """Return the outcome of the comparison: the largest sure difference, or how many models differ from their base."""
    pairs = [(base, other, _sure(gaps)) for base, other, gaps in _compared(frame)]
    changed = [pair for pair in pairs if pair[2]]
    if len(pairs) > 1:
        base = f" from {pairs[0][0]}" if len(frame.families) == 1 else ""
        return f"{len(changed)} of {len(pairs)} models differ{base} beyond the 95 % interval of a paired difference"
    base, other, sure = pairs[0]
    if not sure:
        return f"{other} and {base}: no paired difference is beyond its 95 % interval"
    label, gap = sure[0][1], sure[0][-1]
    condition, _, what = label.partition(": ")
    did = "loses" if gap.value < 0 else "gains"
    return f"{other} {did} {abs(100 * gap.value):.1f} points of {what}, {condition}, against {base}"


def points(gap: Estimate) -> str:
    """Format a difference of shares in points."""
    value, low, high = (f"{100 * v:+.1f}" for v in (gap.value, gap.low, gap.high))
    return f"{value} ({gap.why})" if gap.why else f"{value} [{low}, {high}], n = {gap.n:,}"


def findings(frame: Frame) -> list[tuple[str, str]]:
    """Return (model, sentence) for each compared model: what is lost and gained beyond its interval."""
    said = []
    for base, other, gaps in _compared(frame):
        sure = _sure(gaps)
        told = "; ".join(f"{label} {points(gap)}" for _, label, _, _, gap in sure[:2])
        differs = f"against {base}, {told} (in percentage points; {len(sure)} of {len(gaps)} numbers differ)."
        same = f"no difference from {base} in {len(gaps)} paired numbers is beyond its 95 % interval."
        said.append((other, differs if sure else same))
    return said


def head_tables(frame: Frame) -> list[Table]:
    """Return the best heads of both models side by side, by mean attention on the needle: kept, lost, new and moved."""
    tables = []
    masses = {watched.model: watched.mass for watched in reversed(frame.observations)}
    for base, *others in frame.families:
        for other in (o for o in others if o in masses and base in masses):
            ranks = [_ranks(masses[model]) for model in (base, other)]
            rows = [
                [f"{head[0]}.{head[1]}", str(was or "–"), str(now or "–"), word] for head, was, now, word in best_heads(*ranks)
            ]
            caption = f"Best heads of {base} and {other} (layer.head), ranked by attention on the needle"
            tables.append(Table(["head", f"rank in {base}", f"rank in {other}", "in the best 15 %"], rows, caption))
    return tables


def best_heads(*ranks: Mapping[tuple[int, int], int]) -> list[tuple[tuple[int, int], int | None, int | None, str]]:
    """Return (head, rank in a model, rank in another, word) of the heads that are among the best 15 % of either.

    "kept": among the best of both, with "moved" if its rank differs; "lost": of the first only; "new": of the second only.
    """
    best = [{head for head, rank in of.items() if rank <= max(1, round(FEW_HEADS * len(of)))} for of in ranks]
    rows = []
    for head in sorted(best[0] | best[1], key=lambda h: min(of.get(h, np.inf) for of in ranks)):
        was, now = (of.get(head) for of in ranks)
        word = "kept" if head in best[0] & best[1] else "lost" if head in best[0] else "new"
        rows.append((head, was, now, word + ", moved" * (word == "kept" and was != now)))
    return rows


def _ranks(mass: dict[tuple[int, int], tuple[float, int]]) -> dict[tuple[int, int], int]:
    return {head: i + 1 for i, head in enumerate(sorted(mass, key=lambda head: (-mass[head][0], head)))}
