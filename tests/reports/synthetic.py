"""Made-up runs that look like real ones: three models, every experiment, answers drawn from a simple theory."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from needlework.results import SEMANTICS_VERSION, Observation, Row, Store
from needlework.tasks.base import SCORES_VERSION

LENGTHS = (64, 128, 192, 256)
DEPTHS = (0, 25, 50, 75, 100)
TEXT = "the old harbour wind carries salt over quiet roofs while lamps burn low and somebody counts boats again"
WORDS = tuple(TEXT.split())
NAMES = ("mira", "tobin", "selka", "oren", "vasha", "luden")
VALUES = tuple(f"{a} {b}" for a in ("amber", "cobalt", "ivory", "jade", "umber") for b in ("seven", "three", "nine", "four"))
LAYERS = {"tiny-griffin": "RRARRA", "tiny-jamba": "RRRARRRA", "tiny-mamba": "RRRRRR"}
HEADS = {"tiny-griffin": 4, "tiny-jamba": 8, "tiny-mamba": 0}
WINDOW = {"tiny-griffin": 160, "tiny-jamba": None, "tiny-mamba": None}


def anatomy(model: str) -> dict[str, Any]:
    part = {"query_heads": HEADS[model], "kv_heads": 1, "window": WINDOW[model]}
    layers = [
        {
            "index": i,
            "kind": "attention" if c == "A" else "recurrent",
            "attention": part if c == "A" else None,
            "recurrent": {"mixer": "Mixer"} if c == "R" else None,
        }
        for i, c in enumerate(LAYERS[model])
    ]
    return {"architecture": model.title(), "layers": layers, "window": WINDOW[model], "parameters": 1_200_000}


@dataclass(frozen=True)
class Sample:
    task: str
    mode: str
    id: str
    prompt: str
    target: str
    spans: dict[str, list[list[int]]]
    facts: dict[str, Any]


def needles(model: str, per_cell: int, layout: str = "plain", mode: str = "generate") -> Iterator[Sample]:
    for length in LENGTHS:
        for depth in DEPTHS:
            for i in range(per_cell):
                rng = random.Random(f"{length}/{depth}/{i}")
                who, value = rng.choice(NAMES), rng.choice(VALUES)
                needle = f"the code of {who} is {value} .".split()
                hay = [rng.choice(WORDS) for _ in range(length - len(needle))]
                at = len(hay) * depth // 100
                words = [*hay[:at], *needle, *hay[at:]]
                question = f"question : what is the code of {who} ? answer :".split()
                start = at + (len(question) if layout == "question_first" else 0)
                block = [*question, *words] if layout == "question_first" else [*words, *question]
                whole = block * (2 if layout == "jrt" else 1)
                starts = [start + c * len(block) for c in range(len(whole) // len(block))]
                spans = [[s, s + len(needle)] for s in starts]
                window = WINDOW[model]
                distance = len(whole) - spans[-1][0]
                facts = {
                    "length_tokens": length,
                    "context_tokens": length,
                    "depth_percent": depth,
                    "layout": layout,
                    "in_window": window is None or distance <= window,
                    "relation": "code",
                    "chance": 0.25,
                    "form": "question-0",
                    "needle_distance_tokens": distance,
                    "twin_target": "crimson two",
                    "world": "toy",
                }
                task = "niah" if mode == "generate" else "niah_choice"
                task = task if layout == "plain" else f"{task}_{layout}"
                name = f"niah/length={length}/depth={depth}/{i}"
                yield Sample(task, mode, name, " ".join(whole), value, {"needle": spans}, facts)


def questions(count: int) -> Iterator[Sample]:
    for form in ("cloze", "letter"):
        for i in range(count):
            facts = {"subject": f"realm {i % 6}", "form": form, "chance": 0.25, "layout": "plain"}
            options = "" if form == "cloze" else " ? a one b two c three d four answer :"
            task = "cloze_choice" if form == "cloze" else "letter"
            yield Sample(task, "choices", f"{form}/{i}", f"the capital of realm {i} is{options}", "one", {}, facts)


def texts(count: int) -> Iterator[Sample]:
    for i in range(count):
        yield Sample("perplexity", "perplexity", f"perplexity/{i}", " ".join(WORDS * 4), "", {}, {"context_tokens": 64})


def interventions(model: str) -> list[str]:
    heads = HEADS[model]
    off = ["ablate_recurrent()", "ablate_recurrent(site='block')"]
    if not heads:
        return ["none", *off]
    kept = [f"keep_heads({phase}k={k})" for k in range(heads + 1) for phase in ("", "phase='decode', ", "phase='prefill', ")]
    control = [f"keep_heads(k={k}, by='random', seed={s})" for k in range(1, heads) for s in range(5)]
    return ["none", *kept, *control, "ablate_attention()", "ablate_attention() + ablate_recurrent()", *off]


def exposures() -> list[str]:
    modes = ("keep", "omit", "only", "null", "balanced")
    text = "expose_tokens(phase='decode', mode='{}') + expose_tokens(phase='prefill', mode='{}')"
    return [text.format(decode, prefill) for decode in modes for prefill in modes]


def limits() -> list[str]:
    sizes = (8, 16, 32, 64, 128, 256)
    alone = [f"limit_context({phase}tokens={n})" for phase in ("phase='prefill', ", "phase='decode', ", "") for n in sizes]
    crossed = "limit_context(phase='decode', tokens={}) + limit_context(phase='prefill', tokens={})"
    return [*alone, *(crossed.format(decode, prefill) for decode in sizes for prefill in sizes if decode != prefill)]


def attention_share(model: str, text: str) -> float:
    """How well attention can retrieve under an intervention, in this toy theory."""
    heads = HEADS[model]
    if not heads or "ablate_attention" in text or "decode', mode='omit'" in text or "mode='null'" in text:
        return 0.0
    if "keep_heads" in text:
        k = int(text.split("k=")[1].split(",")[0].rstrip(")"))
        need = 0.17 * heads
        if "random" in text:
            return (k / heads) ** 1.5
        return 0.0 if k == 0 else 1 / (1 + math.exp(-6 * (k - need + 0.7)))
    if "limit_context" in text:
        n = int(text.split("tokens=")[1].split(")")[0])
        return 1 / (1 + math.exp(-(math.log2(n) - (4 if "prefill" in text else 6.5)) * 2))
    return 0.9 if "mode='omit'" in text else 1.0


def chance_of(model: str, text: str, sample: Sample) -> float:
    """The chance of a right answer."""
    if "swap_memory" in text:
        return 0.02 if "half='kv'" in text else 0.97
    recurrent = 0.35 if "ablate_recurrent" in text else 1.0
    floor = sample.facts.get("chance", 0.0) if sample.mode == "choices" else 0.0
    if sample.task in ("cloze_choice", "letter"):
        attention = attention_share(model, text) if HEADS[model] else 1.0
        letter = 0.5 if "letter" in sample.task else 0.15
        ability = 0.95 * (0.2 if recurrent < 1 else 1.0) * (1 - letter * (1 - attention))
        return float(floor + (1 - floor) * ability)
    seen = 1.0 if sample.facts["in_window"] else 0.03
    ability = 0.985 * attention_share(model, text) * seen * (0.6 if recurrent < 1 else 1.0)
    if not HEADS[model]:
        ability = {"plain": 0.3, "jrt": 0.75, "question_first": 0.5}[sample.facts["layout"]]
        ability *= 0.1 if recurrent < 1 else 1.0
    return float(floor + (1 - floor) * ability)


def trial(model: str, experiment: str, sample: Sample, text: str) -> Row:
    key = f"{model}/{sample.task}/{sample.id}/{text}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    draw = (int(digest[:12], 16) % 1_000_003) / 1_000_003
    right = draw < (chance_of(model, text, sample) if sample.mode != "perplexity" else 1)
    scores: dict[str, float] = {"correct": float(right)}
    if sample.mode == "perplexity":
        nll = 2.0 + 1.5 * (1 - attention_share(model, text)) + (3 if "ablate_recurrent" in text else 0) + draw * 0.1
        scores = {"nll": nll, "nll_recall": nll * 1.5, "nll_rest": nll * 0.85, "tokens": 64.0, "tokens_recall": 16.0}
    elif sample.mode == "generate":
        scores |= {"exact": float(right), "graded": 5.0 if right else 1.0}
    wrong = VALUES[int(digest[12:16], 16) % len(VALUES)]
    if "half='kv'" in text:
        wrong = "crimson two"
    output = (sample.target if right else wrong) + " ." if sample.mode == "generate" else ""
    return Row(
        id=digest,
        experiment=experiment,
        model=model,
        task=sample.task,
        sample=sample.id,
        cluster=sample.id,
        seed=0,
        intervention=text,
        mode=sample.mode,
        prompt=sample.prompt,
        prompt_tokens=len(sample.prompt.split()),
        target=sample.target,
        output=output,
        finish="stop" if output else "scored",
        error="",
        seconds=0.01,
        spans=sample.spans,
        facts=sample.facts,
        scores=scores,
        kind=kind_of(sample.task),
        ability=ability_of(sample.task),
        boundary="decode" if sample.mode == "generate" else "",
    )


def kind_of(task: str) -> str:
    """Of the names that this module gives its tasks."""
    return task.removesuffix("_jrt").removesuffix("_question_first")


def ability_of(task: str) -> str:
    return "retrieval" if task.startswith("niah") else "perplexity" if task == "perplexity" else "knowledge"


def sign(store: Store, models: dict[str, dict[str, Any]]) -> None:
    """What a run writes down beside its rows."""
    store.set_meta("models", models)
    store.set_meta("semantics_version", SEMANTICS_VERSION)
    store.set_meta("scores_version", SCORES_VERSION)


def trials(model: str, per_cell: int) -> Iterator[Row]:
    heads = HEADS[model]
    plain, choices = list(needles(model, per_cell)), list(needles(model, per_cell, mode="choices"))
    wide = [*plain, *choices, *questions(12 * per_cell), *texts(2 * per_cell)]
    for text in interventions(model):
        for sample in wide:
            if sample.mode == "generate" or "phase='decode'" not in text:
                yield trial(model, "heads", sample, text)
    for layout in ("jrt", "question_first"):
        for sample in [*needles(model, per_cell, layout), *needles(model, per_cell, layout, "choices")]:
            for text in ["none", "keep_heads(k=0)"] if heads else ["none"]:
                yield trial(model, "jrt", sample, text)
    for text in [*exposures(), *limits(), "swap_memory(half='kv')", "swap_memory(half='recurrent')"] if heads else []:
        for sample in plain:
            yield trial(model, "exposure", sample, text)


def observations(model: str) -> Iterator[Observation]:
    rng = random.Random(model)
    for layer, kind in enumerate(LAYERS[model]):
        for head in range(HEADS[model] if kind == "A" else 0):
            mass = 0.9 if head == 1 else 0.15 * rng.random()
            yield Observation("recording", model, "niah", layer, head, 75, mass, 2.5 * rng.random(), mass * 0.9)


def write(directory: Path, models: tuple[str, ...] = tuple(LAYERS), per_cell: int = 4, hostile: bool = False) -> Path:
    """A store with every experiment; `hostile` puts markup into answers."""
    store = Store(directory, create=True)
    store.db.execute("PRAGMA synchronous=OFF")
    sign(store, {m: {"anatomy": anatomy(m), "weights": f"hash of {m}"} for m in models})
    for model in models:
        rows = list(trials(model, per_cell))
        if hostile:
            bad = "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=1>\u2028&amp; end"
            rows = [Row(**{**vars(row), "output": bad}) if row.mode == "generate" else row for row in rows]
        store.add(rows)
        store.add(list(observations(model)))
    store.close()
    return directory


def multiply(directory: Path, trials: int) -> int:
    """Repeat the trials of a store under other names until it holds at least so many; the number it then holds."""
    store = Store(directory)
    store.db.execute("PRAGMA synchronous=OFF")
    names = [f.name for f in fields(Row)]
    changed = {
        "id": "id || '-' || ?1",
        "sample": "sample || '/' || ?1",
        "cluster": "cluster || '/' || ?1",
        "facts": "replace(facts, '{', '{\"copy\": ' || ?1 || ', ')",
    }
    select = ", ".join(changed.get(name, name) for name in names)
    before = int(store.db.execute("SELECT count(*) FROM trials").fetchone()[0])
    last = int(store.db.execute("SELECT max(rowid) FROM trials").fetchone()[0])
    for copy in range(1, -(-trials // before)):
        query = f"INSERT INTO trials ({', '.join(names)}) SELECT {select} FROM trials WHERE rowid <= ?2"
        store.db.execute(query, (str(copy), last))
    count = int(store.db.execute("SELECT count(*) FROM trials").fetchone()[0])
    store.close()
    return count
