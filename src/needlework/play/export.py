"""The page as one file that needs no server: with the model itself where it runs in the browser, else with recorded answers.

Recorded are, for a few drawn prompts: every number of heads by every way of choosing them, every head, layer and recurrent group
off alone, every way to hide the needle, some context limits, every cut of the recurrent side, the swaps, and the stories with
their attention. The page disables what is not recorded.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from needlework.anatomy import Anatomy
from needlework.errors import NeedleworkError
from needlework.files import atomic_write
from needlework.measure import Progress, no_progress
from needlework.play.browser_model import browser_model
from needlework.play.page import exported_page
from needlework.play.playground import DEPTHS, DRAWS, Looks, Playground
from needlework.play.state import PromptState, RequestState, intervention_of, text_of

MOST_BYTES = 8 * 2**20  # of an exported page
RECORDED_DEPTH, RECORDED_DRAWS = 50, 3
SEEDS = 3  # of random heads
LIMITS = (4, 8, 16, 32, 64)
SITES = ("memory", "conv", "state", "block")
Parts = list[dict[str, Any]]


def export(playground: Playground, path: Path, report: str = "", progress: Progress = no_progress) -> int:
    """Write the page of a model into one file and return its size in bytes.

    Args:
        report: Relative address of a report that the page links to.
        progress: Called with the share of recorded answers that are done.

    Raises:
        NeedleworkError: The page would be larger than MOST_BYTES.
    """
    held = _browser_data(playground) or _recorded_data(playground, progress)
    data, weights = held
    page = exported_page(playground.name, data, weights, report).encode()
    if len(page) > MOST_BYTES and data["recorded"]:  # attention is most of it
        data["recorded"]["attention"] = {}
        page = exported_page(playground.name, data, weights, report).encode()
    if len(page) > MOST_BYTES:
        raise NeedleworkError(f"the page of {playground.name} would have {len(page) >> 20} MiB, more than {MOST_BYTES >> 20}")
    with atomic_write(path) as file:
        file.write(page.decode())
    return len(page)


def each_state(anatomy: Anatomy, rankings: dict[str, list[list[int]]], scores: Sequence[str]) -> Iterator[Parts]:
    """Yield the parts of every state that is recorded; some may not apply to the model."""
    fewest = min((part.query_heads for _, part in anatomy.attention_parts()), default=0)
    ways: list[dict[str, Any]] = [{"by": score} for score in scores if score != "random"]
    ways += [{"by": "random", "seed": seed} for seed in range(SEEDS)]
    ways += [{"by": {"ranking": order}} for order in rankings.values()]
    yield []
    for way in ways:
        for k in range(fewest):
            yield [{"name": "keep_heads", "k": k, **way}]
    yield [{"name": "ablate_attention"}]
    for layer in anatomy.attention_layers:
        yield [{"name": "ablate_attention", "layers": [layer.index]}]
        for head in layer.heads:
            yield [{"name": "ablate_heads", "heads": [list(head)]}]
    for mode in ("omit", "only", "null", "balanced"):
        for phase in ("prefill", "decode", "both"):
            yield [{"name": "expose_tokens", "mode": mode, "phase": phase}]
    for tokens in LIMITS:
        yield [{"name": "limit_context", "tokens": tokens}]
    for site in SITES:
        yield [{"name": "ablate_recurrent", "site": site}]
        for layer in anatomy.recurrent_layers:
            yield [{"name": "ablate_recurrent", "site": site, "layers": [layer.index]}]
    for group in anatomy.groups:
        yield [{"name": "ablate_recurrent_groups", "groups": [list(group)]}]
    halves: Parts = [{"name": "swap_memory", "half": half} for half in ("kv", "recurrent")]
    yield from ([half] for half in halves)
    yield halves


def recorded_states(playground: Playground, rankings: dict[str, list[list[int]]]) -> list[Parts]:
    """Return the parts of all states that are recorded of a model, by distinct text."""
    anatomy = playground.anatomy
    told = [story["parts"] for story in playground.stories() if not story["missing"]]
    found: dict[str, Parts] = {}
    for parts in [*told, *each_state(anatomy, rankings, playground.describe()["scores"])]:
        intervention = intervention_of(parts)
        try:
            intervention.check(anatomy)
        except NeedleworkError:
            continue  # the model has no such part
        found[_written(parts, anatomy)] = parts
    return list(found.values())


def _written(parts: Parts, anatomy: Anatomy) -> str:
    """Return the text that the page writes for parts: layers are left out where they are all of their side."""
    sides = {"ablate_attention": anatomy.attention_layers, "ablate_recurrent": anatomy.recurrent_layers}
    for part in parts:
        side = sides.get(part["name"])
        if side is not None and part.get("layers") == [layer.index for layer in side]:
            del part["layers"]
    return text_of(parts)


def _recorded_data(playground: Playground, progress: Progress) -> tuple[dict[str, Any], bytes | None]:
    description = playground.describe()
    rankings = _rankings(playground)
    description["rankings"] = list(rankings)
    length = playground.first_draw["length"]
    samples = {
        f"{length}/{RECORDED_DEPTH}/{seed}": playground.sample(length, RECORDED_DEPTH, seed) for seed in range(RECORDED_DRAWS)
    }
    description |= {
        "provider": "recorded",
        "draws": description["draws"] | {"lengths": [length], "depths": [RECORDED_DEPTH], "draws": RECORDED_DRAWS},
    }
    states = recorded_states(playground, rankings)
    asked = [
        (name, RequestState(prompt=prompt, parts=tuple(parts), max_new_tokens=description["max_new_tokens"]))
        for name, prompt in samples.items()
        for parts in states
        if prompt.twin or not any(part["name"] == "swap_memory" for part in parts)
    ]
    answers: dict[str, dict[str, Any]] = {name: {} for name in samples}
    prompts: dict[str, Any] = {}
    for (name, _), answer in zip(asked, playground.generate_all([request for _, request in asked], progress), strict=True):
        prompts[name] = answer["prompt"]
        kept = {key: value for key, value in answer.items() if key not in ("prompt", "intervention")}
        answers[name][answer["intervention"]] = _rounded(kept)
    data = {
        "description": description,
        "stories": playground.stories(),
        "samples": _samples(samples),
        "rankings": rankings,
        "recorded": {"answers": answers, "prompts": prompts, "attention": _attention(playground, samples)},
        "browser": None,
    }
    return data, None


def _attention(playground: Playground, samples: dict[str, PromptState]) -> dict[str, Any]:
    """Return the attention of the stories, as recorded.js reads it."""
    if not playground.anatomy.attention_layers:
        return {}
    found: dict[str, Any] = {}
    for name, prompt in samples.items():
        found[name] = {}
        for state in playground.tour(prompt):
            looks = playground.looks(state)
            count = next(iter(looks.layers.values())).shape[0]
            tokens = [_packed(looks, token) for token in range(count)]
            found[name][text_of(list(state.parts))] = {"needle": looks.to_dict(0)["needle"], "tokens": tokens}
    return found


def _packed(looks: Looks, token: int) -> list[dict[str, Any]]:
    keys = looks.prompt_tokens + token
    packed = []
    for layer, weights in looks.layers.items():
        shares = np.round(weights[token, :, :keys].astype(float) * 255).astype(np.uint8)
        packed.append({"layer": layer, "heads": len(shares), "keys": keys, "bytes": base64.b64encode(shares.tobytes()).decode()})
    return packed


def _browser_data(playground: Playground) -> tuple[dict[str, Any], bytes | None] | None:
    """Return the data of a page whose model runs in the browser; None if this model cannot."""
    made = browser_model(playground.subject)
    if made is None:
        return None
    description = playground.describe()
    lengths = description["draws"]["lengths"]
    samples = {
        f"{length}/{depth}/{seed}": playground.sample(length, depth, seed)
        for length in lengths
        for depth in DEPTHS
        for seed in range(DRAWS)
    }
    data = {
        "description": {**description, "provider": "browser"},
        "stories": playground.stories(),
        "samples": _samples(samples),
        "rankings": _rankings(playground),
        "recorded": None,
        "browser": made.header,
    }
    return data, made.weights


def _rankings(playground: Playground) -> dict[str, list[list[int]]]:
    """Return the rankings of the page; none where the model finds too few needles to rank heads on."""
    try:
        return {name: playground.ranking(name) for name in playground.describe()["rankings"]}
    except NeedleworkError:
        return {}


def _samples(samples: dict[str, PromptState]) -> dict[str, Any]:
    return {name: prompt.model_dump(mode="json") for name, prompt in samples.items()}


def _rounded(value: Any) -> Any:
    """Return a copy with five significant digits in every fraction."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
