"""Compute the numbers that the rules read (Evidence) for each model, and the verdicts on all models."""

from __future__ import annotations

from needlework import stats
from needlework.analysis.conditions import RANKING, Condition, ranking_name, without_first
from needlework.analysis.findings import Context, Curve, Evidence, Kept, Verdict
from needlework.analysis.frame import Frame
from needlework.analysis.model_trials import ModelTrials, by_boundary
from needlework.analysis.verdicts import judge
from needlework.interventions import parse
from needlework.interventions.scores import RANDOM
from needlework.stats import NOTHING, Estimate

NO_CONTEXT = parse("ablate_attention(phase='prefill') + expose_tokens('only', phase='decode')")
ENTROPY = "entropy"
NAMED = ("niah", "niah_choice")  # default task names, which verdicts do not mention


HELPS = 0.10  # repeating the prompt helps a model if the lower bound of its gain in retrieval is above this


def helped_by_reading_twice(frame: Frame) -> str:
    """Return the first model whose baseline retrieval improves when the prompt is repeated, with the gain; "" if none."""
    for model in frame.models:
        gain = by_boundary(frame, model)[0].reading_twice()
        if gain.n and gain.low > HELPS:
            bounds = f"[{stats.percent(gain.low, '')}, {stats.percent(gain.high, '')}; n = {gain.n:,}]"
            return f"{model} (by {stats.percent(gain.value, '')} points {bounds})"
    return ""


def collect(trials: ModelTrials, reading_twice_helps: str) -> Evidence:
    """Compute all evidence on one model under one boundary.

    Args:
        reading_twice_helps: Result of `helped_by_reading_twice` over all models: the positive control of rule 3.
    """
    few, off, recurrent = trials.few_heads(), trials.heads_off(), trials.recurrent_off()
    layouts = {name: trials.silenced(name) for name in ("jrt", "question_first")}
    exposed = trials.text_by_place(((c.prefill, c.decode), c) for c in trials.conditions_of("expose"))
    reading = trials.heads_off("prefill")
    without_context = {
        "reading": reading.text if reading else None,
        "answering": exposed.get(("keep", "only")),
        "together": trials.text_of(NO_CONTEXT),
    }
    swaps = [c.text for c in trials.conditions_of("swap") if c.half != "both"]
    texts_of_claim = {
        "segregation": _texts(off),
        "few_heads": _texts(few),
        "exposure": [exposed[place] for place in (("keep", "omit"), ("omit", "keep")) if place in exposed],
        "context": [text for text in without_context.values() if text],
        "double_dissociation": _texts(off, recurrent),
        "memory": swaps,
    }
    layers = trials.frame.anatomy(trials.model).get("layers", [])
    return Evidence(
        model=trials.model,
        note=trials.note,
        baseline=trials.accuracy(trials.retrieval("none")),
        baselines={claim: e for claim, texts in texts_of_claim.items() if (e := trials.baseline(texts)).n},
        tasks={claim: names for claim, texts in texts_of_claim.items() if (names := _task_names(trials, claim, texts))},
        silenced=trials.silenced("plain"),
        heads=trials.heads,
        few_kept=(few.kept(trials.heads) or 0) if few else 0,
        curves=_curves(trials, few),
        few_knowledge=[
            Kept(form, pairs.raw, pairs.corrected)
            for form in ("cloze", "letter")
            if few and len((pairs := trials.retained_knowledge(few.text, form)).after)
        ],
        layouts={name: silenced for name, silenced in layouts.items() if silenced.exact.n},
        layouts_untouched={name: e for name in layouts if (e := trials.accuracy(trials.retrieval("none", layout=name))).n},
        reading_twice_helps=reading_twice_helps,
        omit_decode=trials.accuracy(trials.retrieval(exposed.get(("keep", "omit"), "-"))),
        omit_prefill=_retained_if_any(trials, exposed.get(("omit", "keep"))),
        context=Context(
            **{name: _retained_if_any(trials, text) for name, text in without_context.items()},
            limits=trials.limits(),
            limits_both=trials.limits(both=True),
        ),
        interaction=trials.interaction(),
        dissociation=_four_shares(trials),
        follows_kv=trials.follows_kv(in_window=True),
        follows_kv_outside=trials.follows_kv(in_window=False),
        has_attention=not layers or any(layer.get("attention") for layer in layers),
        has_recurrence=not layers or any(layer.get("recurrent") for layer in layers),
    )


def _curves(trials: ModelTrials, few: Condition | None) -> list[Curve]:
    """Return retained retrieval by number of heads kept: first the way that is judged, then those compared with it."""
    if few is None:
        return []
    rankings = dict.fromkeys(c.by for c in trials.conditions_of("heads", phase="both", way=RANKING))
    judged = (few.way, few.by if few.way == RANKING else "")
    ways = [judged, (few.way + without_first(1), ""), *((RANKING, ranking) for ranking in rankings), (RANDOM, "")]
    curves = [_curve(trials, way, ranking) for way, ranking in dict.fromkeys(ways)]
    return [curve for curve in curves if curve.points]


def _curve(trials: ModelTrials, way: str, ranking: str) -> Curve:
    points = trials.retained_by_heads(way, ranking)
    if way == RANKING:
        name = ranking_name(ranking)
        label = f"by {name} on other samples" if name else "by a ranking"
    else:
        label = "at random" if way == RANDOM else f"by {way}"
    seen = [sinks for sinks in trials.frame.sinks.get(trials.model, ()) if way != RANKING or sinks.content in ranking]
    known = {kept: seen[0].share(way, kept) for kept in points} if seen and way in (ENTROPY, RANKING, RANDOM) else {}
    return Curve(label, points, known)


def _texts(*conditions: Condition | None) -> list[str]:
    return [condition.text for condition in conditions if condition is not None]


def _task_names(trials: ModelTrials, claim: str, texts: list[str]) -> str:
    """Return the names of the needle tasks behind a verdict, "" if all have default names."""
    modes = ("generate", "choices") if claim == "segregation" else ("generate",)
    names = list(dict.fromkeys(name for mode in modes for name, _ in trials.needle_tasks(texts, mode)))
    return "" if set(names) <= set(NAMED) else ", ".join(names)


def _retained_if_any(trials: ModelTrials, text: str | None) -> Estimate:
    return trials.retained(text).raw if text and len(trials.retrieval(text)) else NOTHING


def _four_shares(trials: ModelTrials) -> list[tuple[str, Estimate]]:
    """Return the chance-corrected retained share of each ability with each side ablated."""
    sides = {name: trials.sides(name) for name in ("retrieval", "knowledge")}
    shares = []
    for off, label in (("attention_off", "attention"), ("recurrent_off", "recurrent side")):
        for name, side in sides.items():
            if side is not None:
                left = stats.retained(getattr(side, off), side.base, side.clusters, side.chance)
                shares.append((f"{name} without {label}", left))
    return shares


def verdicts(frame: Frame) -> list[Verdict]:
    """Judge every claim for every model, on the first boundary (decode before prefill) that has trials for it."""
    helps = helped_by_reading_twice(frame)
    chosen = []
    for model in frame.models:
        judged = [judge(collect(trials, helps)) for trials in by_boundary(frame, model)]
        by_claim = zip(*judged, strict=True)
        chosen += [next((v for v in verdicts_of_claim if v.estimate.n), verdicts_of_claim[0]) for verdicts_of_claim in by_claim]
    return chosen
