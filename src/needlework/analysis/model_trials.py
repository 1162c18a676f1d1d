"""Select the trials of one model under one boundary, and estimate accuracies and retained shares from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from needlework import stats
from needlework.analysis.conditions import Condition, few_heads_rank, place, same, ways
from needlework.analysis.frame import ALL, ANY_SAMPLE, Frame, Ints, Pick, Want
from needlework.interventions import Intervention
from needlework.stats import Estimate, Interaction
from needlework.terminal import display_name

Floats = NDArray[np.float64]
Key = TypeVar("Key", bound=Hashable)
SITES = ("memory", "block")
BOUNDARIES = ("decode", "prefill", "")  # order of preference for verdicts where several were run
AGAINST = ("context", "all", "absent")  # order of preference: telling values in the context apart needs binding
NEEDLE = {"generate": "niah", "choices": "niah_choice"}
LINKED = "linked"  # kind of the multi-hop retrieval task
ASSOCIATION = "association"  # kind of the task whose questions share no word with the needle
HOPS = ("one hop", "two hops", "three hops")
KNOWLEDGE = ("cloze_choice", "letter", "letter_lookup", "cloze", "lm-eval")  # kinds of task in order of preference


@dataclass(frozen=True)
class Pairs:
    """Scores of the same samples with and without an intervention; all arrays are [samples]."""

    after: Floats
    before: Floats
    clusters: Ints
    chance: float

    @property
    def raw(self) -> Estimate:
        """The retained share, after / before."""
        return stats.retained(self.after, self.before, self.clusters)

    @property
    def corrected(self) -> Estimate:
        """The chance-corrected retained share, (after - chance) / (before - chance)."""
        return stats.retained(self.after, self.before, self.clusters, self.chance)


@dataclass(frozen=True)
class ModelTrials:
    """Trials of one model with one boundary (the phase of the last prompt token), and its scored trials, which have none."""

    frame: Frame
    model: str
    boundary: str = "decode"
    judged: bool = True  # the boundary that verdicts prefer; scored trials are drawn only with it

    @property
    def note(self) -> str:
        """Remark that names a boundary other than decode."""
        return "" if self.boundary in ("decode", "") else f"boundary: {self.boundary}"

    def titled(self, title: str) -> str:
        """Return a title with the boundary added unless it is decode."""
        return ", ".join(part for part in (title if title != self.model or not self.note else "", self.note) if part)

    @property
    def name(self) -> str:
        """The model, with its boundary unless it is decode."""
        return f"{self.model} · {self.note}" if self.note else self.model

    @property
    def heads(self) -> int:
        """Number of heads per layer; if the store does not record it, the largest k of any condition."""
        known = self.frame.heads(self.model)
        return known or max((c.k or 0 for c in self.conditions if c.kind == "heads"), default=0)

    def kept_share(self, condition: Condition) -> str:
        """Format the number of heads kept: `1 of 4 heads (25 %)`."""
        kept = condition.kept(self.heads) or 0
        return f"{kept} of {self.heads} heads ({stats.percent(kept / self.heads)})" if self.heads else "no heads"

    @cached_property
    def conditions(self) -> list[Condition]:
        return [place(text) for text in self.frame.distinct("text", model=self.model)]

    def conditions_of(self, kind: str, **wanted: Any) -> list[Condition]:
        """Return the conditions of this kind whose fields have these values."""
        wanted["kind"] = kind
        return [c for c in self.conditions if all(getattr(c, field) == value for field, value in wanted.items())]

    @property
    def unplaced(self) -> list[tuple[str, str]]:
        """Return (label, intervention) of the interventions that no rule reads: of plug-ins, of some layers only, and so on."""
        return [(display_name(c.text, 60), c.text) for c in self.conditions if c.kind in ("other", "attention_block")]

    def text_by_place(self, pairs: Iterable[tuple[Key, Condition]]) -> dict[Key, str]:
        """Return one intervention per key (a place on a figure's axis): of equivalent texts, the one with more trials."""
        chosen: dict[Key, str] = {}
        for key, condition in pairs:
            if key not in chosen or len(self.retrieval(condition.text)) > len(self.retrieval(chosen[key])):
                chosen[key] = condition.text
        return chosen

    # Selections of trials. Each names the values of every field of Pick.

    @cached_property
    def needle_kinds(self) -> dict[str, str]:
        """Mode -> kind of the retrieval task: needle in a haystack, or another kind if it is the only one that was run."""
        kinds = self.frame.distinct("mode", "kind", model=self.model, ability="retrieval")
        families = {kind.removesuffix("_choice") for _, kind in kinds}
        return NEEDLE if NEEDLE["generate"] in families or len(families) != 1 else {**NEEDLE, **dict(kinds)}

    def needle_pick(self, text: str, mode: str = "generate", layout: str = "plain", in_window: Want[bool] = True) -> Pick:
        """Return the selection of one-hop needle trials under an intervention.

        Task names, settings, lengths and depths are pooled. A forced choice is scored against one set of options only, the
        first of AGAINST that was run.
        """
        kind = self.needle_kinds[mode]
        options = self.frame.distinct("against", model=self.model, kind=kind, mode=mode, text=text, layout=layout)
        against = next((name for name in AGAINST if name in options), "")
        settings = [s for s in self.frame.distinct("setting", model=self.model, kind=kind, mode=mode) if one_hop(s)]
        named = {"against": against, "layout": layout, "setting": settings, "in_window": in_window}
        return self.pick("retrieval", kind, mode, text, **named)

    def pick(self, ability: Want[str], kind: str, mode: str, text: Want[str], **named: Want[Any]) -> Pick:
        """Return the selection of one kind of task under an intervention.

        Unless `named` says otherwise, it is pooled over task names and settings, in the plain layout, and inside the window.
        """
        fields: dict[str, Any] = {"model": self.model, "ability": ability, "kind": kind, "mode": mode, "text": text}
        fields |= {"task": ALL, "setting": ALL, "against": "", "boundary": self.boundary if mode == "generate" else ""}
        fields |= {"layout": "plain", "form": "", "in_window": True, **ANY_SAMPLE}
        return Pick(**{**fields, **named})

    def retrieval(self, text: str, mode: str = "generate", layout: str = "plain", in_window: bool = True) -> Ints:
        """Return the needle trials under an intervention (see `needle_pick`)."""
        return self.frame.rows(self.needle_pick(text, mode, layout, in_window))

    @cached_property
    def needle_forms(self) -> dict[str, tuple[str, list[str]]]:
        """Label -> (kind, settings) of needles that reports compare: by hops, or by question and parts; {} if there is one form.

        One hop includes needle tasks of the same relations.
        """
        settings = {
            kind: self.frame.distinct("setting", model=self.model, kind=kind, mode="generate")
            for kind in (NEEDLE["generate"], LINKED, ASSOCIATION)
        }
        relations = {_option(setting, "relation") for setting in settings[LINKED]}
        near = [s for s in settings[NEEDLE["generate"]] if _option(s, "relation") in relations and one_hop(s)]
        forms: dict[str, tuple[str, list[str]]] = {HOPS[0]: (NEEDLE["generate"], near)} if settings[LINKED] else {}
        for setting in settings[LINKED]:
            hops = _option(setting, "hops")
            label = HOPS[hops - 1] if hops <= len(HOPS) else f"{hops} hops"
            forms.setdefault(label, (LINKED, []))[1].append(setting)
        for setting in sorted(settings[ASSOCIATION], key=lambda s: (_option(s, "parts"), _option(s, "ask") != "letter")):
            label = "by the letter" if _option(setting, "ask") == "letter" else "by association"
            label += ", two parts" if _option(setting, "parts") == 2 else ""
            forms.setdefault(label, (ASSOCIATION, []))[1].append(setting)
        return forms if len(forms) > 1 else {}

    def of_form(self, label: str, text: str) -> Ints:
        """Return the trials of one of `needle_forms`, inside the window."""
        kind, settings = self.needle_forms.get(label, ("", []))
        return self.frame.rows(self.pick("retrieval", kind, "generate", text, setting=settings))

    def needle_tasks(self, texts: Iterable[str], mode: str = "generate") -> list[tuple[str, str]]:
        """Return (name, setting) of the needle tasks that were run under these interventions."""
        picks = [vars(self.needle_pick(text, mode)) for text in texts]
        return list(dict.fromkeys(task for pick in picks for task in self.frame.distinct("task", "setting", **pick)))

    def baseline(self, texts: Iterable[str]) -> Estimate:
        """Return retrieval without intervention on the same tasks that were run under these interventions."""
        pick = self.needle_pick("none")
        picks = [replace(pick, task=task, setting=setting) for task, setting in self.needle_tasks(texts)]
        return self.accuracy(self.frame.of_groups(g for one in picks for g in self.frame.matching(one)))

    def knowledge_kinds(self, form: str) -> list[tuple[str, str]]:
        """Return (kind, mode) of the knowledge tasks of this form, the one that verdicts use first.

        Forced-choice tasks come before generating ones, and the toy world's before lm-eval's.
        """
        kinds = self.frame.distinct("kind", "mode", model=self.model, ability="knowledge", form=form)
        order = {kind: i for i, kind in enumerate(KNOWLEDGE)}
        return sorted(kinds, key=lambda pair: (pair[1] != "choices", order.get(pair[0], len(order)), pair[0]))

    def knowledge(self, text: str, form: str, which: int = 0) -> Ints:
        """Return the trials of one kind of knowledge task (number `which` of `knowledge_kinds`), pooled over its tasks."""
        kinds = self.knowledge_kinds(form)
        if which >= len(kinds):
            return np.zeros(0, dtype=np.int64)
        kind, mode = kinds[which]
        against = "all" if mode == "choices" else ""
        return self.frame.rows(self.pick("knowledge", kind, mode, text, against=against, form=form, in_window=ALL))

    def forms(self) -> list[str]:
        """Return the forms of the knowledge tasks that were run."""
        asked = self.frame.distinct("form", model=self.model, ability="knowledge")
        return [form for form in ("cloze", "letter", "lookup", "judgement", "") if form in asked]

    # Estimates.

    def accuracy(self, rows: Ints, score: str = "correct") -> Estimate:
        return stats.accuracy(self.frame.values(score, rows))

    def pairs(self, rows: Ints, base: Ints) -> Pairs:
        """Pair trials with the base trials of the same sample; trials without a partner or a score are dropped."""
        frame = self.frame
        samples, base_samples = frame.column("sample", rows), frame.column("sample", base)
        by_sample = np.full(max(samples.max(initial=0), base_samples.max(initial=0)) + 1, np.nan)
        by_sample[base_samples] = frame.values("correct", base)
        before, after = by_sample[samples], frame.values("correct", rows)
        both = ~(np.isnan(before) | np.isnan(after))
        return Pairs(after[both], before[both], frame.column("cluster", rows)[both], frame.chance(rows[both]))

    def retained(self, text: str) -> Pairs:
        """Return retrieval under an intervention, paired with the baseline."""
        return self.pairs(self.retrieval(text), self.retrieval("none"))

    def retained_knowledge(self, text: str, form: str, which: int = 0) -> Pairs:
        return self.pairs(self.knowledge(text, form, which), self.knowledge("none", form, which))

    def heads_off(self, phase: str = "both") -> Condition | None:
        """Return the condition that zeroes all heads; of equivalent ones, the one with more trials."""
        off = [c for c in self.conditions_of("heads", phase=phase) if c.attention_off]
        return max(off, key=lambda c: len(self.retrieval(c.text)) + len(self.retrieval(c.text, "choices")), default=None)

    def few_heads(self, phase: str = "both") -> Condition | None:
        """Return the condition that keeps about 15 % of the heads (`few_heads_rank`), by the preferred way to select heads."""
        order = ways()
        near = [
            (order.index(c.way), rank, c.fraction is None, c)
            for c in self.conditions_of("heads", phase=phase)
            if c.way in order and (kept := c.kept(self.heads)) and (rank := few_heads_rank(kept, self.heads))
        ]
        return min(near, key=lambda found: found[:3], default=(None,))[-1]

    def retained_by_heads(self, way: str, ranking: str = "") -> dict[int, Estimate]:
        """Return the retained share of retrieval per number of heads kept in both phases, pooled over random seeds.

        Heads are selected in one way (`Condition.way`); for "ranking", `ranking` is its text, or "" for any.
        """
        asked = [c for c in self.conditions_of("heads", phase="both", way=way) if ranking in ("", c.by)]
        base = self.retrieval("none")
        pairs = {kept: self.pairs(rows, base) for kept, rows in self.by_heads(asked, self.retrieval).items() if kept}
        return {kept: of_kept.raw for kept, of_kept in pairs.items() if len(of_kept.after)}

    def by_heads(self, conditions: Iterable[Condition], rows: Callable[[str], Ints]) -> dict[int, Ints]:
        """Return trials by number of heads kept, fewest first, pooled over the seeds of random heads."""
        texts: dict[int, dict[int, list[str]]] = {}
        for c in conditions:
            if (kept := c.kept(self.heads)) is not None:
                texts.setdefault(kept, {}).setdefault(c.seed if kept else 0, []).append(c.text)
        # of equivalent texts (k=2, fraction=0.125) only the one with more trials is used
        return {
            kept: np.concatenate([max(map(rows, same), key=len) for same in by_seed.values()])
            for kept, by_seed in sorted(texts.items())
        }

    def text_of(self, wanted: Intervention) -> str | None:
        """Return the text under which an equivalent intervention was run; of several, the one with more trials."""
        texts = [c.text for c in self.conditions if same(c.text, wanted)]
        return max(texts, key=lambda text: len(self.retrieval(text)), default=None)

    def reading_twice(self) -> Estimate:
        """Return the gain in baseline retrieval from repeating the prompt (jrt - plain), paired by needle and haystack."""
        keys = ["setting", "cluster", "context_tokens", "depth_percent"]  # they do not depend on the prompt's layout
        tables = []
        for layout in ("plain", "jrt"):
            rows = self.retrieval("none", layout=layout)
            table = self.frame.groups.iloc[self.frame.column("group", rows)].reset_index(drop=True)
            table["cluster"], table["right"] = self.frame.column("cluster", rows), self.frame.values("correct", rows)
            tables.append(table.drop_duplicates(keys, keep="last")[[*keys, "right"]])
        both = tables[0].merge(tables[1], on=keys, suffixes=("_once", "_twice"))
        return stats.gain(both["right_twice"], both["right_once"], both["cluster"])

    def recurrent_off(self) -> Condition | None:
        """Return the condition that ablates the recurrent side, at the preferred site (memory before block)."""
        conditions = self.conditions_of("recurrent", phase="both")
        return min(conditions, key=lambda c: SITES.index(c.site), default=None)

    def sides(self, ability: str) -> stats.Side | None:
        """Return retrieval, or knowledge in its first form: untouched and with either side off, on the samples common to all."""
        attention, recurrent = self.heads_off(), self.recurrent_off()
        if attention is None or recurrent is None:
            return None
        form = (self.forms() or [""])[0]
        texts = ("none", attention.text, recurrent.text)
        rows = [self.retrieval(t) if ability == "retrieval" else self.knowledge(t, form) for t in texts]
        samples = [self.frame.column("sample", r) for r in rows[1:]]
        common = np.intersect1d(samples[0], samples[1])
        kept = [r[np.isin(of_rows, common)] for r, of_rows in zip(rows[1:], samples, strict=True)]
        first, second = (self.pairs(r[np.argsort(self.frame.column("sample", r), kind="stable")], rows[0]) for r in kept)
        if len(first.after) == 0 or len(first.after) != len(second.after):
            return None
        return stats.Side(first.before, first.after, second.after, first.clusters, first.chance)

    def interaction(self) -> Interaction | None:
        """Return the interaction of ablated side and ability; None if not run or if a baseline is at or below chance."""
        retrieval, knowledge = self.sides("retrieval"), self.sides("knowledge")
        if retrieval is None or knowledge is None or np.mean(knowledge.base) <= knowledge.chance:
            return None
        return stats.interaction(retrieval, knowledge) if np.mean(retrieval.base) > 0 else None

    def swapped(self, half: str, in_window: bool) -> Ints:
        """Return the needle trials with this half of the cache (kv, recurrent or both) swapped with the twin's."""
        texts = [c.text for c in self.conditions_of("swap", half=half)]
        parts = [self.retrieval(text, in_window=in_window) for text in texts]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def follows_kv(self, in_window: bool) -> Estimate:
        """Return the share of answers that agree with the KV cache: the twin's if it was swapped, else the prompt's own."""
        kv, recurrent = self.swapped("kv", in_window), self.swapped("recurrent", in_window)
        values = [self.frame.values("follows_twin", kv), self.frame.values("correct", recurrent)]
        return stats.accuracy(np.concatenate(values))

    def limits(self, both: bool = False) -> list[tuple[int, Estimate]]:
        """Return (tokens, retrieval) under `limit_context` in prefill (in both phases if `both`), sorted, without sinks."""
        limits = self.conditions_of("limit", sinks=0)
        texts = self.text_by_place((int(c.prefill), c) for c in limits if c.prefill and c.decode == (c.prefill if both else ""))
        points = [(tokens, self.accuracy(self.retrieval(text))) for tokens, text in texts.items()]
        return sorted((point for point in points if point[1].n), key=lambda point: point[0])


def _option(setting: str, name: str) -> Any:
    return (json.loads(setting) if setting else {}).get(name)


def one_hop(setting: str) -> bool:
    """Return whether a task's answer is in a single needle; hops, parts and the letter of associations are counted separately."""
    return (
        _option(setting, "hops") in (None, 1) and _option(setting, "parts") in (None, 1) and _option(setting, "ask") != "letter"
    )


def by_boundary(frame: Frame, model: str) -> list[ModelTrials]:
    """Return a model's trials per boundary with generated answers, the one that verdicts prefer first."""
    generated = frame.distinct("boundary", model=model, mode="generate")
    boundaries = [boundary for boundary in BOUNDARIES if boundary in generated] or ["decode"]
    return [ModelTrials(frame, model, boundary, boundary == boundaries[0]) for boundary in boundaries]


def by_model_and_boundary(frame: Frame) -> list[ModelTrials]:
    return [trials for model in frame.models for trials in by_boundary(frame, model)]
