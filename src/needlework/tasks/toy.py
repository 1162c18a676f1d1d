"""Conversion of toy-language samples to items. Every word is one token, so that spans are always exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from needlework.errors import NeedleworkError
from needlework.interventions.acts import Span
from needlework.tasks.base import Item, Tokenizer
from needlework.tasks.prompts import token_ids
from needlework.toy.sample import Stream, ToySample, Words
from needlework.toy.words import WORD_ID

STOP = "."  # ends an answer in the toy language


def is_toy(tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer contains the toy vocabulary with the same ids."""
    vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    return all(vocabulary.get(word) == number for word, number in WORD_ID.items())


def resolve(world: str, tokenizer: Tokenizer) -> str:
    """Return "toy" or "english" for this tokenizer; raise NeedleworkError if the task's `world` field demands the other."""
    toy = is_toy(tokenizer)
    if world == "toy" and not toy:
        raise NeedleworkError("world: toy needs a zoo model; this tokenizer does not speak the toy language")
    if world == "english" and toy:
        raise NeedleworkError("world: english needs a model that knows English; this one speaks the toy language")
    return "toy" if toy else "english"


def demand_toy(tokenizer: Tokenizer, kind: str) -> None:
    if not is_toy(tokenizer):
        raise NeedleworkError(
            f"task {kind!r} asks about the toy world, which only zoo models know; "
            "for real models use `needlework eval MODEL --tasks mmlu`"
        )


def encoded(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[int, ...]:
    """Return the token ids of toy words with BOS; raise NeedleworkError for unknown words."""
    ids = token_ids(tokenizer, " ".join(words), special=True)
    expected = tuple(WORD_ID.get(word, -1) for word in words)
    if ids[len(ids) - len(words) :] != expected:
        wrong = [word for word in words if word not in WORD_ID]
        raise NeedleworkError(f"not a text of the toy language: {' '.join(wrong or words)[:60]!r}")
    return ids


def toy_item(
    tokenizer: Tokenizer,
    sample: ToySample,
    name: str,
    *,
    cluster: str = "",
    absent: int = 3,
    in_context: int | None = None,  # most wrong options that occur in the context; None: all
    facts: Mapping[str, Any] = MappingProxyType({}),
    window: int | None = None,
) -> Item:
    """Return the item of a sample, with options for a forced choice and a twin where the sample has absent values."""
    prompt = encoded(tokenizer, sample.prompt)
    spans = _spans(sample, len(prompt) - len(sample.prompt))
    kinds, options = _options(sample, absent, in_context, name)
    twin = _twin(sample)
    return Item(
        id=name,
        cluster=cluster or name,
        prompt=prompt,
        prompt_text=sample.text,
        target=sample.target_text,
        spans=spans,
        options=tuple(tuple(WORD_ID[word] for word in option) for option in options),
        answer=options.index(sample.target) if options else None,
        twins={"twin": encoded(tokenizer, twin[0])} if twin else {},
        twin_target=" ".join(twin[1]) if twin else "",
        facts={
            **_known_facts(sample),
            **option_facts(kinds, [" ".join(option) for option in options]),
            **placed_facts(spans, len(prompt), window),
            **facts,
        },
    )


def _spans(sample: ToySample, front: int) -> dict[str, Span]:
    """Return the token ranges of a sample's spans and of its value; `front` is the number of tokens before the first word."""
    words = {name: [(s.start, s.stop) for s in sample.named(name)] for name in (span.name for span in sample.spans)}
    if value := _value_spans(sample):
        words.setdefault("value", value)
    return {name: tuple((start + front, stop + front) for start, stop in ranges) for name, ranges in words.items()}


def option_facts(kinds: Sequence[str], options: Sequence[str]) -> dict[str, Any]:
    """Return facts about the options: their texts, their kinds, and the accuracy of guessing."""
    if not options:
        return {}
    facts: dict[str, Any] = {"options": list(options), "option_kinds": list(kinds), "chance": 1 / len(options)}
    for name in ("context", "absent"):
        if name in kinds:
            facts[f"chance_{name}"] = 1 / (1 + list(kinds).count(name))
    return facts


def placed_facts(spans: Mapping[str, Span], prompt_tokens: int, window: int | None) -> dict[str, Any]:
    """Return the needle's distance from the end of the prompt, and whether the prompt's last token can attend to all of it.

    With several needle spans (copies in JRT, chains, several values), only the last one counts.
    """
    if not spans.get("needle"):
        return {}
    distance = prompt_tokens - max(start for start, _ in spans["needle"])
    return {"needle_distance_tokens": distance, "in_window": window is None or distance <= window}


def _known_facts(sample: ToySample) -> dict[str, Any]:
    """Return the sample's fields that become facts of its item."""
    names = ("subject", "relation", "key", "form", "layout", "depth_percent", "context_tokens")
    known = {name: getattr(sample, name) for name in names if getattr(sample, name) is not None}
    return {**known, "world": "toy", **({"needles": 1 + len(sample.distractors)} if sample.named("needle") else {})}


def _options(sample: ToySample, absent: int, in_context: int | None, name: str) -> tuple[list[str], list[Words]]:
    """Return the kinds of the options and the options, shuffled with the item's name as seed unless the sample has choices."""
    if sample.choices:
        assert sample.answer is not None
        return ["true" if i == sample.answer else "other" for i in range(len(sample.choices))], list(sample.choices)
    if len(sample.absent) < absent:
        raise NeedleworkError(f"absent: {absent} is more than the {len(sample.absent)} values that can be offered")
    value = _value(sample)
    lead = sample.target[: len(sample.target) - len(value)]
    options = [("true", sample.target)]
    others = Stream("distractors", name).mixed(sample.distractors)[:in_context]
    options += [("context", (*lead, *v)) for v in others]
    options += [("absent", (*lead, *v)) for v in sample.absent[:absent]]
    if len(options) < 2:
        return [], []
    mixed = Stream("options", name).mixed(options)
    return [kind for kind, _ in mixed], [words for _, words in mixed]


def _value(sample: ToySample) -> Words:
    """Return the value in the target: all of its words, or the last ones of a quoted sentence."""
    length = len(sample.absent[0]) if sample.absent else len(sample.target)
    return sample.target[len(sample.target) - length :]


def _value_spans(sample: ToySample) -> list[tuple[int, int]]:
    """Return the word ranges of the value at the end of every needle span; none if a span does not end with it."""
    value = _value(sample)
    places = [(span.stop - len(value), span.stop) for span in sample.named("needle")]
    return places if all(sample.prompt[start:stop] == value for start, stop in places) else []


def _twin(sample: ToySample) -> tuple[Words, Words] | None:
    """Return prompt and target with the first absent value instead of the true one; None if that is not possible."""
    places = _value_spans(sample)
    if not sample.absent or not places:
        return None
    value, other = _value(sample), sample.absent[0]
    words = list(sample.prompt)
    for start, stop in places:
        words[start:stop] = other
    return tuple(words), (*sample.target[: len(sample.target) - len(value)], *other)
