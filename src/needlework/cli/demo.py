"""The short demo: one experiment of its plan after the other, and after each the claims that it decided."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from needlework.analysis.frame import Frame
from needlework.analysis.model_trials import by_boundary
from needlework.analysis.reader import load
from needlework.analysis.verdicts import RULES, Verdict, share, verdicts
from needlework.cli.options import show
from needlework.experiments.models import CachedModels
from needlework.experiments.plan import Plan, get
from needlework.experiments.progress import Tracker
from needlework.experiments.result import Result
from needlework.experiments.run import run
from needlework.experiments.trials import expand_all
from needlework.interventions.acts import RANDOM
from needlework.reports.page import FILE_NAME, PLAYGROUND
from needlework.results import Store, claimed
from needlework.stats import NOTHING, Estimate
from needlework.tables import Table
from needlework.terminal import say

if TYPE_CHECKING:
    from needlework.subject import Subject

SENTENCES = {  # claim -> the beginning of its sentence, what one model does with its deciding number, and what this is a share of
    "segregation": ("With all attention heads off", "finds", "the needles"),
    "few_heads": ("With about 15 % of the heads", "keeps", "its retrieval"),
    "no_rescue": ("With all heads off and the context read twice", "finds", "the needles"),
    "exposure": ("With the needle hidden from attention while answering", "finds", "the needles"),
    "context": ("With no attention while reading and only the needle in sight while answering", "keeps", "its retrieval"),
    "double_dissociation": (
        "Losing attention costs retrieval more than knowledge, against losing recurrence",
        "by",
        "the untouched ability",
    ),
    "memory": ("When KV cache and recurrent state disagree", "follows the KV cache in", "its answers"),
}
NEXT = """\
What next?
  needlework ask smollm2-135m 'The capital of France is' --intervene none --intervene 'keep_heads(k=2)'   English (270 MB, once)
  needlework play tiny-griffin                     switch parts of a model off and see its answer change
  needlework run 02 --model ./my-model --out runs/mine   which heads your own model needs
  needlework demo --full                           all conditions, four hybrids and transformers, more samples
  needlework explain few_heads                     what a claim says and when it counts as supported"""


DRAWING, PLAYING = "drawing the report", "writing the playground"
MORE = {DRAWING: 8.0, PLAYING: 4.0}  # seconds of two reports and of the playground
PLAYED = "tiny-griffin"


def run_demo(plan: str | Path | Plan, out: Path, source: CachedModels | None = None, **loading: Any) -> Result:
    """Run the plan's experiments one by one into one store, and print each claim as soon as it is decided.

    Every step runs the plan up to its experiment, so that the store after the last step is that of `needlework run` with
    this plan. Models stay loaded between the steps. They are examined after the first claim is decided, because the doctor
    needs kernels that the first steps do not. The report is written when the first claim is decided, and at the end, then
    with a playground beside it.
    """
    began = time.perf_counter()
    whole = get(plan, **loading)
    source = source or CachedModels()
    told: dict[str, str] = {}
    with _tracker(whole, out, source) as tracker:
        steps = len(whole.experiments)
        for count, experiment in enumerate(whole.experiments, 1):
            say(f"[{count}/{steps}] {experiment.name}: {experiment.about.partition(': ')[2] or experiment.about}")
            so_far = replace(whole, experiments=whole.experiments[:count])
            options: dict[str, Any] = {"tell": count == steps, "doctor": "quick" if told else "off", "regroup": True}
            result = run(so_far, out, source=source, progress=tracker, **options)
            frame = load([out])
            first = not told
            for text in tell_decided(frame, told, last=count == steps):
                say(f"\n{text}\n", stderr=False)
            if told and first:
                show(demo_table(frame))
                with tracker.phase("", DRAWING, of=2):
                    report = result.report()
                picture = report.parent / "figures" / "finding.png"
                seconds = time.perf_counter() - began
                say(f"\n{seconds:.0f} s: first picture in {picture}, first report in {report}\n", stderr=False)
        show(demo_table(frame))
        with tracker.phase("", PLAYING):
            played = write_playground(source.subject(PLAYED), out)
        with tracker.phase("", DRAWING, of=2):
            report = result.report()
    seconds = time.perf_counter() - began
    say(f"\n{seconds:.0f} seconds. Report: {report}\nPlayground, in your browser: {played}\n\n{NEXT}", stderr=False)
    return result


@contextmanager
def _tracker(plan: Plan, out: Path, source: CachedModels) -> Iterator[Tracker]:
    """Yield a tracker of all steps, whose bar is open meanwhile."""
    works = expand_all(plan, source)
    with claimed(out) as folder, closing(Store(folder, create=True)) as store:
        tracker = Tracker(works, store, shown=True, more=MORE)
    with tracker.bar:
        yield tracker


def write_playground(subject: Subject, out: Path) -> Path:
    """Write the playground of a model beside the report in `out`; each of the two has a link to the other."""
    from needlework.play.export import export
    from needlework.play.playground import Playground

    export(Playground(subject, PLAYED), out / PLAYGROUND, FILE_NAME)
    return out / PLAYGROUND


def tell_decided(frame: Frame, told: dict[str, str], last: bool) -> list[str]:
    """Return the text of each claim that is decided for all models that it was asked of, or is decided otherwise than before.

    Args:
        told: The outcomes that were told, by claim; those of the returned texts are added.
        last: Whether no more samples come, so that what is not decided remains so.
    """
    found, texts = verdicts(frame), []
    for rule in RULES:
        claim = [one for one in found if one.claim == rule.claim and one.points and one.word not in ("does not apply", "not run")]
        outcome = "; ".join(f"{one.model} {one.word}" for one in claim)
        decided = claim and all(one.word in ("supported", "not supported") for one in claim)
        if (decided or (claim and last)) and told.get(rule.claim) != outcome:
            texts.append(claim_text(frame, claim))
            told[rule.claim] = outcome
    return texts


def claim_text(frame: Frame, claim: Sequence[Verdict]) -> str:
    """Return a claim's title with its outcomes, and one plain sentence with the number of every model."""
    outcomes: dict[str, list[str]] = {}
    for one in claim:
        outcomes.setdefault(one.word, []).append(one.model)
    words = "; ".join(f"{word} ({', '.join(models)})" for word, models in outcomes.items())
    beginning, verb, what = SENTENCES[claim[0].claim]
    numbers = [f"{one.model} {verb} {share(one.estimate, what)}" for one in claim]
    if claim[0].claim == "few_heads":
        numbers = [f"{number}, and {_random_text(frame, one)}" for number, one in zip(numbers, claim, strict=True)]
    sentence = fill(f"{beginning}, {'; '.join(numbers)}.", 100)
    return f"{claim[0].title}: {words}.\n{sentence}"


def _random_text(frame: Frame, verdict: Verdict) -> str:
    return f"{share(_few(frame, verdict.model)[1])} with as many random heads"


def _few(frame: Frame, model: str) -> tuple[Estimate, Estimate]:
    """Return the retained shares of retrieval with few heads by entropy, and with as many at random."""
    trials = by_boundary(frame, model)[0]
    few = trials.few_heads()
    if few is None:
        return NOTHING, NOTHING
    random = trials.retained_by_heads(RANDOM).get(few.kept(trials.heads) or 0, NOTHING)
    return trials.retained(few.text).raw, random


def demo_table(frame: Frame) -> Table:
    """Return the needles found by each model, by what was switched off; columns that were not asked yet are left out."""
    columns = ("model", "untouched", "no heads", "few heads", "as many at random", "no recurrent memory")
    rows = []
    for model in frame.models:
        trials = by_boundary(frame, model)[0]
        off, recurrent = trials.heads_off(), trials.recurrent_off()
        found = [trials.accuracy(trials.retrieval("none"))]
        found.append(trials.accuracy(trials.retrieval(off.text)) if off else NOTHING)
        found += _few(frame, model)
        found.append(trials.accuracy(trials.retrieval(recurrent.text)) if recurrent else NOTHING)
        rows.append([model, *(share(e).partition("; n")[0] + "]" if e.n else "" for e in found)])
    used = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    return Table([columns[i] for i in used], [[row[i] for i in used] for row in rows], left=columns[:1])
