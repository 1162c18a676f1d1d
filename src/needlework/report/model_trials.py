"""The trials of one model under one boundary, and the numbers made of them. Every selection of trials for a number is here."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from needlework import stats
from needlework.anatomy import heads_of_share
from needlework.interventions import Intervention
from needlework.report.conditions import FEW_HEADS, Condition, place, same, ways
from needlework.report.frame import ALL, ANY_SAMPLE, Frame, Ints, Pick, Want
from needlework.stats import Estimate, Interaction
from needlework.verdicts import Silenced

Floats = NDArray[np.float64]
Key = TypeVar("Key", bound=Hashable)
NEAR_FEW = 0.05  # how far from 15 % a share of heads may be to be judged as few, where a nearer one could have been kept
SITES = ("memory", "block")
BOUNDARIES = ("decode", "prefill", "")  # which one is judged where several were run
AGAINST = ("context", "all", "absent")  # which choice is judged: the values in the context need binding, not mere presence
NEEDLE = {"generate": "niah", "choices": "niah_choice"}
LINKED = "linked"  # the kind of task whose answers stand more than one hop away
KNOWLEDGE = ("cloze_choice", "letter", "letter_lookup", "cloze", "lm-eval")  # which kind stands for a form, first of all


@dataclass(frozen=True)
class Pairs:
    """The same samples with and without an intervention."""

    after: Floats
    before: Floats
    clusters: Ints
    chance: float

    @property
    def raw(self) -> Estimate:
        return stats.retained(self.after, self.before, self.clusters)

    @property
    def corrected(self) -> Estimate:
        return stats.retained(self.after, self.before, self.clusters, self.chance)


@dataclass(frozen=True)
class ModelTrials:
    """The trials of one model in which the last prompt token belonged to `boundary`, and its scored trials, which have none."""

    frame: Frame
    model: str
    boundary: str = "decode"
    judged: bool = True  # of a model's boundaries, the one that verdicts prefer; scored trials are drawn with it only

    @property
    def note(self) -> str:
        """What is said beside every number that is not of the usual boundary."""
        return "" if self.boundary in ("decode", "") else f"boundary: {self.boundary}"

    def titled(self, title: str) -> str:
        """A title that says the boundary, too, if it is not the usual one."""
        return ", ".join(part for part in (title if title != self.model or not self.note else "", self.note) if part)

    @property
    def name(self) -> str:
        """For the titles of lists of trials."""
        return f"{self.model} · {self.note}" if self.note else self.model

    @property
    def heads(self) -> int:
        """Heads per layer; where the store does not say, the most that were kept in any trial."""
        known = self.frame.heads(self.model)
        return known or max((c.k or 0 for c in self.conditions if c.kind == "heads"), default=0)

    def kept_share(self, condition: Condition) -> str:
        """How many of the heads are kept: `1 of 4 heads (25 %)`."""
        kept = condition.kept(self.heads) or 0
        return f"{kept} of {self.heads} heads ({stats.percent(kept / self.heads)})" if self.heads else "no heads"

    @cached_property
    def conditions(self) -> list[Condition]:
        return [place(text) for text in self.frame.distinct("text", model=self.model)]

    def conditions_of(self, kind: str, **wanted: Any) -> list[Condition]:
        wanted["kind"] = kind
        return [c for c in self.conditions if all(getattr(c, field) == value for field, value in wanted.items())]

    def text_by_place(self, pairs: Iterable[tuple[Key, Condition]]) -> dict[Key, str]:
        """The intervention at each place of a figure's axis; of two texts that do the same, the one with more trials."""
        chosen: dict[Key, str] = {}
        for key, condition in pairs:
            if key not in chosen or len(self.retrieval(condition.text)) > len(self.retrieval(chosen[key])):
                chosen[key] = condition.text
        return chosen

    # Selections: each says for every field of a Group which values it takes.

    @cached_property
    def needle_kinds(self) -> dict[str, str]:
        """By mode: needles in a haystack, or the only kind of retrieval that was asked, if it is another and the only one."""
        kinds = self.frame.distinct("mode", "kind", model=self.model, ability="retrieval")
        families = {kind.removesuffix("_choice") for _, kind in kinds}
        return NEEDLE if NEEDLE["generate"] in families or len(families) != 1 else {**NEEDLE, **dict(kinds)}

    def needle_pick(self, text: str, mode: str = "generate", layout: str = "plain", in_window: Want[bool] = True) -> Pick:
        """Needles found in one hop, of all tasks of the kind: their names and settings are pooled, lengths and depths too."""
        kind = self.needle_kinds[mode]
        settings = self.frame.distinct("setting", model=self.model, kind=kind, mode=mode)
        options = self.frame.distinct("against", model=self.model, kind=kind, mode=mode, text=text, layout=layout)
        against = next((name for name in AGAINST if name in options), "")
        pick = self._pick("retrieval", kind, mode, against, text, layout, form="", in_window=in_window)
        return replace(pick, setting=[setting for setting in settings if one_hop(setting)])

    def _pick(
        self, ability: str, kind: str, mode: str, against: str, text: str, layout: str, form: str, in_window: Want[bool]
    ) -> Pick:
        """Trials of all tasks of one kind, whatever their names, settings and samples."""
        return Pick(
            model=self.model,
            ability=ability,
            kind=kind,
            task=ALL,
            setting=ALL,
            mode=mode,
            against=against,
            text=text,
            boundary=self.boundary if mode == "generate" else "",
            layout=layout,
            form=form,
            in_window=in_window,
            **ANY_SAMPLE,
        )

    def retrieval(self, text: str, mode: str = "generate", layout: str = "plain", in_window: bool = True) -> Ints:
        return self.frame.rows(self.needle_pick(text, mode, layout, in_window))

    @cached_property
    def hops(self) -> dict[int, list[str]]:
        """How many hops away answers were asked for -> the settings of those tasks; one hop by needles of the same relations.

        Empty if nothing was more than one hop away.
        """
        asked: dict[int, list[str]] = {1: []}
        for setting in self.frame.distinct("setting", model=self.model, kind=LINKED, mode="generate"):
            asked.setdefault(_option(setting, "hops"), []).append(setting)
        relations = {_option(setting, "relation") for settings in asked.values() for setting in settings}
        for setting in self.frame.distinct("setting", model=self.model, kind=NEEDLE["generate"], mode="generate"):
            if _option(setting, "relation") in relations and one_hop(setting):
                asked[1].append(setting)
        return asked if len(asked) > 1 else {}

    def in_hops(self, hops: int, text: str) -> Ints:
        """Answers that stand this many sentences away from the asked name, in the window."""
        kind = NEEDLE["generate"] if hops == 1 else LINKED
        pick = self._pick("retrieval", kind, "generate", "", text, "plain", form="", in_window=True)
        return self.frame.rows(replace(pick, setting=self.hops.get(hops, [])))

    def needle_tasks(self, texts: Iterable[str], mode: str = "generate") -> list[tuple[str, str]]:
        """(name, setting) of the needle tasks that were asked under these interventions."""
        numbers = [g for text in texts for g in self.frame.matching(self.needle_pick(text, mode))]
        return list(dict.fromkeys((self.frame.groups[g].task, self.frame.groups[g].setting) for g in numbers))

    def baseline(self, texts: Iterable[str]) -> Estimate:
        """Untouched retrieval, of the tasks that were asked under these interventions: no other can vouch for them."""
        asked = set(self.needle_tasks(texts))
        numbers = self.frame.matching(self.needle_pick("none"))
        same_tasks = [g for g in numbers if (self.frame.groups[g].task, self.frame.groups[g].setting) in asked]
        return self.accuracy(self.frame.of_groups(same_tasks))

    def knowledge_kinds(self, form: str) -> list[tuple[str, str]]:
        """(kind, mode) of the tasks that asked for knowledge in this form, the one that is judged first.

        Tasks that choose among options go before those that generate, and the toy world's before lm-eval's.
        """
        kinds = self.frame.distinct("kind", "mode", model=self.model, ability="knowledge", form=form)
        order = {kind: i for i, kind in enumerate(KNOWLEDGE)}
        return sorted(kinds, key=lambda pair: (pair[1] != "choices", order.get(pair[0], len(order)), pair[0]))

    def knowledge(self, text: str, form: str, which: int = 0) -> Ints:
        """Trials of one kind of task that asks for knowledge in this form; names and settings of its tasks are pooled."""
        kinds = self.knowledge_kinds(form)
        if which >= len(kinds):
            return np.zeros(0, dtype=np.int64)
        kind, mode = kinds[which]
        against = "all" if mode == "choices" else ""
        return self.frame.rows(self._pick("knowledge", kind, mode, against, text, "plain", form, in_window=ALL))

    def forms(self) -> list[str]:
        """In which forms knowledge was asked for."""
        asked = self.frame.distinct("form", model=self.model, ability="knowledge")
        return [form for form in ("cloze", "letter", "lookup", "judgement", "") if form in asked]

    # Numbers.

    def accuracy(self, rows: Ints, score: str = "correct") -> Estimate:
        return stats.accuracy(self.frame.values(score, rows))

    def pairs(self, rows: Ints, base: Ints) -> Pairs:
        """Trials of `rows` beside the base's answer to the same sample; those without one are left out."""
        by_sample = np.full(int(self.frame.sample.max(initial=0)) + 1, np.nan)
        by_sample[self.frame.sample[base]] = self.frame.values("correct", base)
        before, after = by_sample[self.frame.sample[rows]], self.frame.values("correct", rows)
        both = ~(np.isnan(before) | np.isnan(after))
        return Pairs(after[both], before[both], self.frame.cluster[rows][both], self.frame.chance(rows[both]))

    def retained(self, text: str) -> Pairs:
        return self.pairs(self.retrieval(text), self.retrieval("none"))

    def retained_knowledge(self, text: str, form: str, which: int = 0) -> Pairs:
        return self.pairs(self.knowledge(text, form, which), self.knowledge("none", form, which))

    def heads_off(self, phase: str = "both") -> Condition | None:
        """The condition that silences all heads; of two that do the same, the one with more trials."""
        off = [c for c in self.conditions_of("heads", phase=phase) if c.attention_off]
        return max(off, key=lambda c: len(self.retrieval(c.text)) + len(self.retrieval(c.text, "choices")), default=None)

    def few_heads(self, phase: str = "both") -> Condition | None:
        """The condition that keeps the share of heads nearest to 15 %, chosen in the way that claims prefer; of two that are
        equally near, the one that keeps more. What is more than five points off counts only if no other number is nearer."""
        order, rounded = ways(), heads_of_share(FEW_HEADS, self.heads)
        near = [
            (order.index(c.way), off, -kept, c.fraction is None, c)
            for c in self.conditions_of("heads", phase=phase)
            if c.way in order and (kept := c.kept(self.heads))
            for off in [round(abs(kept / self.heads - FEW_HEADS), 9)]  # 1 of 10 and 2 of 10 are equally near
            if kept == rounded or off <= NEAR_FEW
        ]
        return min(near, key=lambda found: found[:4], default=(None,))[-1]

    def retained_by_heads(self, way: str, ranking: str = "") -> dict[int, Estimate]:
        """What is left of retrieval against heads kept at every position, chosen in this way; random seeds are pooled.

        `ranking`: which one, where the way is one of several rankings.
        """
        texts: dict[int, dict[int, list[str]]] = {}
        for c in self.conditions_of("heads", phase="both", way=way):
            if (kept := c.kept(self.heads)) and ranking in ("", c.by):
                texts.setdefault(kept, {}).setdefault(c.seed, []).append(c.text)
        base = self.retrieval("none")
        points = {}
        for kept, by_seed in sorted(texts.items()):
            # of two texts that do the same (k=2, fraction=0.125) the one with more trials stands for both
            rows = [max((self.retrieval(text) for text in same), key=len) for same in by_seed.values()]
            pairs = self.pairs(np.concatenate(rows), base)
            if len(pairs.after):
                points[kept] = pairs.raw
        return points

    def text_of(self, wanted: Intervention) -> str | None:
        """The text under which an intervention was run, however it was spelt; of several, the one with more trials."""
        texts = [c.text for c in self.conditions if same(c.text, wanted)]
        return max(texts, key=lambda text: len(self.retrieval(text)), default=None)

    def reading_twice(self) -> Estimate:
        """Needles found by reading twice minus by reading once, untouched: the same needles in the same haystacks."""
        once, twice = (self._by_needle(self.retrieval("none", layout=layout)) for layout in ("plain", "jrt"))
        both = [key for key in once if key in twice]
        clusters = [key[1] for key in both]
        return stats.gain([twice[key] for key in both], [once[key] for key in both], clusters)

    def _by_needle(self, rows: Ints) -> dict[tuple[Any, ...], float]:
        """Whether each needle was found, by everything that tells it from others but the layout of its prompt."""
        found = {}
        for row, right in zip(rows.tolist(), self.frame.values("correct", rows).tolist(), strict=True):
            group = self.frame.groups[int(self.frame.group[row])]
            found[group.setting, int(self.frame.cluster[row]), group.context_tokens, group.depth_percent] = right
        return found

    def silenced(self, layout: str) -> Silenced:
        off = self.heads_off()
        if off is None:
            return Silenced()
        choices = self.retrieval(off.text, "choices", layout)
        exact = self.accuracy(self.retrieval(off.text, layout=layout))
        return Silenced(exact, self.accuracy(choices), self.frame.chance(choices))

    def recurrent_off(self) -> Condition | None:
        """The condition that silences the recurrent side, at the site that claims prefer."""
        conditions = self.conditions_of("recurrent", phase="both")
        return min(conditions, key=lambda c: SITES.index(c.site), default=None)

    def sides(self, ability: str) -> stats.Side | None:
        """One ability under none, attention off and recurrence off, on the samples that saw all three."""
        attention, recurrent = self.heads_off(), self.recurrent_off()
        if attention is None or recurrent is None:
            return None
        form = (self.forms() or [""])[0]
        texts = ("none", attention.text, recurrent.text)
        rows = [self.retrieval(t) if ability == "retrieval" else self.knowledge(t, form) for t in texts]
        common = np.intersect1d(self.frame.sample[rows[1]], self.frame.sample[rows[2]])
        keep = [r[np.isin(self.frame.sample[r], common)] for r in rows[1:]]
        keep = [r[np.argsort(self.frame.sample[r], kind="stable")] for r in keep]
        first, second = self.pairs(keep[0], rows[0]), self.pairs(keep[1], rows[0])
        if len(first.after) == 0 or len(first.after) != len(second.after):
            return None
        return stats.Side(first.before, first.after, second.after, first.clusters, first.chance)

    def interaction(self) -> Interaction | None:
        retrieval, knowledge = self.sides("retrieval"), self.sides("knowledge")
        if retrieval is None or knowledge is None or np.mean(knowledge.base) <= knowledge.chance:
            return None
        return stats.interaction(retrieval, knowledge) if np.mean(retrieval.base) > 0 else None

    def swapped(self, half: str, in_window: bool) -> Ints:
        """Needles that were asked after this half of the memory (or "both") came from the twin."""
        texts = [c.text for c in self.conditions_of("swap", half=half)]
        parts = [self.retrieval(text, in_window=in_window) for text in texts]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def follows_kv(self, in_window: bool) -> Estimate:
        """The share of answers that follow the half of the memory that is the KV cache, whichever half was swapped."""
        kv, recurrent = self.swapped("kv", in_window), self.swapped("recurrent", in_window)
        values = [self.frame.values("follows_twin", kv), self.frame.values("correct", recurrent)]
        return stats.accuracy(np.concatenate(values))

    def limits(self, both: bool = False) -> list[tuple[int, Estimate]]:
        """Retrieval against the context in sight of prefill (of decode, too, if `both`), fewest tokens first; no sinks."""
        limits = self.conditions_of("limit", sinks=0)
        texts = self.text_by_place((int(c.prefill), c) for c in limits if c.prefill and c.decode == (c.prefill if both else ""))
        points = [(tokens, self.accuracy(self.retrieval(text))) for tokens, text in texts.items()]
        return sorted((point for point in points if point[1].n), key=lambda point: point[0])


def _option(setting: str, name: str) -> Any:
    return (json.loads(setting) if setting else {}).get(name)


def one_hop(setting: str) -> bool:
    """Whether a task asks for something that stands in one needle; to follow needles to others is another ability."""
    return _option(setting, "hops") in (None, 1)


def by_boundary(frame: Frame, model: str) -> list[ModelTrials]:
    """A model's trials for each boundary under which it generated anything; those that verdicts prefer come first."""
    generated = frame.distinct("boundary", model=model, mode="generate")
    boundaries = [boundary for boundary in BOUNDARIES if boundary in generated] or ["decode"]
    return [ModelTrials(frame, model, boundary, boundary == boundaries[0]) for boundary in boundaries]


def by_model_and_boundary(frame: Frame) -> list[ModelTrials]:
    return [trials for model in frame.models for trials in by_boundary(frame, model)]
