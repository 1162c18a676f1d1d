"""Samples of the toy world as items. Every word is one token, so spans, options and twins are always possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from needlework.errors import NeedleworkError
from needlework.interventions.acts import Span
from needlework.tasks.base import Item, Tokenizer
from needlework.tasks.prompts import token_ids
from needlework.toy.sample import Sample, Stream, Words
from needlework.toy.words import WORD_ID

STOP = "."  # ends every answer of the toy language


def is_toy(tokenizer: Tokenizer) -> bool:
    """The tokenizer speaks the toy language: the zoo's words under the zoo's numbers."""
    vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    return all(vocabulary.get(word) == number for word, number in WORD_ID.items())


def resolve(world: str, tokenizer: Tokenizer) -> str:
    """Toy or english, for a task's `world` field; toy words need the toy tokenizer."""
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
    """Ids of a prompt with what the tokenizer puts in front (BOS)."""
    ids = token_ids(tokenizer, " ".join(words), special=True)
    expected = tuple(WORD_ID.get(word, -1) for word in words)
    if ids[len(ids) - len(words) :] != expected:
        wrong = [word for word in words if word not in WORD_ID]
        raise NeedleworkError(f"not a text of the toy language: {' '.join(wrong or words)[:60]!r}")
    return ids


def toy_item(
    tokenizer: Tokenizer,
    sample: Sample,
    name: str,
    *,
    cluster: str = "",
    absent: int = 3,
    in_context: int | None = None,  # at most so many options that stand in the context
    facts: Mapping[str, Any] = MappingProxyType({}),
    window: int | None = None,
) -> Item:
    """An item from a sample, with forced choice and a twin wherever the sample has a value that could be another."""
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


def _spans(sample: Sample, front: int) -> dict[str, Span]:
    """Token ranges of a sample's spans, `front` tokens standing before its first word; and where its value stands."""
    words = {name: [(s.start, s.stop) for s in sample.named(name)] for name in (span.name for span in sample.spans)}
    if value := _value_spans(sample):
        words.setdefault("value", value)
    return {name: tuple((start + front, stop + front) for start, stop in ranges) for name, ranges in words.items()}


def option_facts(kinds: Sequence[str], options: Sequence[str]) -> dict[str, Any]:
    """What a reader must know about the options: their texts, which stand in the context, and what guessing gives."""
    if not options:
        return {}
    facts: dict[str, Any] = {"options": list(options), "option_kinds": list(kinds), "chance": 1 / len(options)}
    for name in ("context", "absent"):
        if name in kinds:
            facts[f"chance_{name}"] = 1 / (1 + list(kinds).count(name))
    return facts


def placed_facts(spans: Mapping[str, Span], prompt_tokens: int, window: int | None) -> dict[str, Any]:
    """How far back the needle is, and whether all of it is in the window of the token that begins the answer.

    With several copies (JRT) the nearest one counts.
    """
    if not spans.get("needle"):
        return {}
    distance = prompt_tokens - max(start for start, _ in spans["needle"])
    return {"needle_distance_tokens": distance, "in_window": window is None or distance <= window}


def _known_facts(sample: Sample) -> dict[str, Any]:
    """What the sample says about itself, as facts of its item."""
    names = ("subject", "relation", "key", "form", "layout", "depth_percent", "context_tokens")
    known = {name: getattr(sample, name) for name in names if getattr(sample, name) is not None}
    return {**known, "world": "toy", **({"needles": 1 + len(sample.distractors)} if sample.named("needle") else {})}


def _options(sample: Sample, absent: int, in_context: int | None, name: str) -> tuple[list[str], list[Words]]:
    """Options in an order that depends on the item's name alone, and which of them stand in the context."""
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


def _value(sample: Sample) -> Words:
    """The words of the target that another value would replace: all of them, or the end of a quoted sentence."""
    length = len(sample.absent[0]) if sample.absent else len(sample.target)
    return sample.target[len(sample.target) - length :]


def _value_spans(sample: Sample) -> list[tuple[int, int]]:
    """Where the value stands: at the end of every copy of the needle. Nothing if some copy holds no value."""
    value = _value(sample)
    places = [(span.stop - len(value), span.stop) for span in sample.named("needle")]
    return places if all(sample.prompt[start:stop] == value for start, stop in places) else []


def _twin(sample: Sample) -> tuple[Words, Words] | None:
    """The prompt and the target with the first absent value instead of the true one, in every copy of the needle."""
    places = _value_spans(sample)
    if not sample.absent or not places:
        return None
    value, other = _value(sample), sample.absent[0]
    words = list(sample.prompt)
    for start, stop in places:
        words[start:stop] = other
    return tuple(words), (*sample.target[: len(sample.target) - len(value)], *other)
