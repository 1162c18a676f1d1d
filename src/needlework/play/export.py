"""The page as one file that needs no server: with the model itself where it runs in the browser, else with recorded answers.

Recorded are, for a few drawn prompts: every number of heads by every way of choosing them, every head, layer and recurrent group
off alone, every way to hide the needle, some context limits, every cut of the recurrent side, the swaps, and the stories with
their attention. The page disables what is not recorded.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from needlework.anatomy import Anatomy
from needlework.errors import NeedleworkError
from needlework.files import atomic_write
from needlework.measure import Progress, no_progress, require_tokenizer
from needlework.play.page import exported_page
from needlework.play.playground import Playground
from needlework.play.state import PromptState, RequestState, intervention_of, text_of
from needlework.requests import stop_tokens
from needlework.subject import Subject
from needlework.tasks.toy import STOP, is_toy

MOST_BYTES = 8 * 2**20  # of an exported page
RECORDED_DEPTH, RECORDED_DRAWS = 50, 3
SEEDS = 3  # of random heads
LIMITS = (4, 8, 16, 32, 64)
SITES = ("memory", "conv", "state", "block")
FAMILY = "recurrent_gemma"
ACTIVATION = "gelu_pytorch_tanh"
MOST_PARAMETERS = 1_800_000  # base64 of their 24 bits leaves room for the rest of a page of 8 MiB
Parts = list[dict[str, Any]]


def export(playground: Playground, path: Path, report: str = "", progress: Progress = no_progress) -> int:
    """Write the page of a model into one file and return its size in bytes.

    Args:
        report: Relative address of a report that the page links to.
        progress: Called with the share of recorded answers that are done.

    Raises:
        NeedleworkError: The page would be larger than MOST_BYTES.
    """
    try:
        rankings = {name: playground.ranking(name) for name in playground.describe()["rankings"]}
    except NeedleworkError:
        rankings = {}  # the model finds too few needles to rank heads on
    description, header, weights = playground.describe(), None, None
    if refusal(playground.subject):
        draws = {"lengths": [playground.first_draw["length"]], "depths": [RECORDED_DEPTH], "draws": RECORDED_DRAWS}
        description |= {"provider": "recorded", "rankings": list(rankings), "draws": description["draws"] | draws}
    else:
        description["provider"] = "browser"
        header, weights = browser_model(playground.subject)
    draws = description["draws"]
    places = product(draws["lengths"], draws["depths"], range(draws["draws"]))
    samples = {f"{length}/{depth}/{seed}": playground.sample(length, depth, seed) for length, depth, seed in places}
    data: dict[str, Any] = {
        "description": description,
        "stories": playground.stories(),
        "samples": {name: prompt.model_dump(mode="json") for name, prompt in samples.items()},
        "rankings": rankings,
        "recorded": None if header else _recorded(playground, samples, rankings, progress),
        "browser": header,
    }
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
    sides = {
        "ablate_attention": [layer.index for layer in anatomy.attention_layers],
        "ablate_recurrent": [layer.index for layer in anatomy.recurrent_layers],
    }
    found: dict[str, Parts] = {}
    for parts in [*told, *each_state(anatomy, rankings, playground.describe()["scores"])]:
        intervention = intervention_of(parts)
        try:
            intervention.check(anatomy)
        except NeedleworkError:
            continue  # the model has no such part
        for part in parts:  # as the page writes them: without layers where they are all of their side
            if part.get("layers") == sides.get(part["name"], ()):
                del part["layers"]
        found[text_of(parts)] = parts
    return list(found.values())


def _recorded(
    playground: Playground, samples: dict[str, PromptState], rankings: dict[str, list[list[int]]], progress: Progress
) -> dict[str, Any]:
    """Return the answers to all samples in all recorded states, and the attention of the stories, as recorded.js reads them."""
    states, most = recorded_states(playground, rankings), playground.describe()["max_new_tokens"]
    asked = [
        (name, RequestState(prompt=prompt, parts=tuple(parts), max_new_tokens=most))
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
    return {"answers": answers, "prompts": prompts, "attention": _attention(playground, samples)}


def _attention(playground: Playground, samples: dict[str, PromptState]) -> dict[str, Any]:
    """Return the attention of the stories, with one byte for each weight."""
    if not playground.anatomy.attention_layers:
        return {}
    found: dict[str, Any] = {}
    for name, prompt in samples.items():
        found[name] = {}
        for state in playground.tour(prompt):
            looks = playground.looks(state)
            tokens = []
            for token in range(next(iter(looks.layers.values())).shape[0]):
                keys, packed = looks.prompt_tokens + token, list[dict[str, Any]]()
                for layer, weights in looks.layers.items():
                    shares = np.round(weights[token, :, :keys].astype(float) * 255).astype(np.uint8)
                    content = base64.b64encode(shares.tobytes()).decode()
                    packed.append({"layer": layer, "heads": len(shares), "keys": keys, "bytes": content})
                tokens.append(packed)
            found[name][text_of(list(state.parts))] = {"needle": looks.to_dict(0)["needle"], "tokens": tokens}
    return found


def _rounded(value: Any) -> Any:
    """Return a copy with five significant digits in every fraction."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def browser_model(subject: Subject) -> tuple[dict[str, Any], bytes]:
    """Return a model as static/griffin.js reads it: its header as JSON values, and its packed weights."""
    model, tokenizer = subject.model, require_tokenizer(subject)
    tensors, parts, offset = [], [], 0
    for name, parameter in model.model.named_parameters():
        factors, numbers = pack(parameter.detach().float().cpu().numpy())
        places = {"factors": offset, "numbers": offset + len(factors)}
        tensors.append({"name": name, "shape": list(parameter.shape), **places})
        parts += [factors, numbers]
        offset += len(factors) + len(numbers)
    words = tokenizer.convert_ids_to_tokens(range(model.config.vocab_size))
    eos = getattr(model.generation_config, "eos_token_id", None)
    header = {
        "config": _config(model),
        "tensors": tensors,
        "vocabulary": words,
        "special": sorted(tokenizer.all_special_ids),
        "start": list(tokenizer("")["input_ids"]),
        "stop": sorted(stop_tokens(eos, [words.index(STOP)])),
    }
    return header, b"".join(parts)


def pack(weights: np.ndarray) -> tuple[bytes, bytes]:
    """Return weights as one float32 factor for each row, and as whole numbers of 24 bits, all little-endian.

    With fewer bits a rounded score may choose another head of two that are almost equal: weights in fp16 change logits of
    tiny-griffin by up to 0.35 under `keep_heads`, and by 4e-3 otherwise, more than the 2e-3 that the page has to keep.
    """
    rows = weights.reshape(-1, weights.shape[-1]).astype(np.float64)
    factors = (np.abs(rows).max(1, keepdims=True) / (2**23 - 2)).astype("<f4")
    numbers = np.round(rows / np.where(factors > 0, factors, 1)).astype("<i4")
    return factors.tobytes(), numbers.reshape(-1, 1).view(np.uint8)[:, :3].tobytes()


def refusal(subject: Subject) -> str:
    """Return why a model does not run in the browser; empty if it does."""
    architecture, config = subject.anatomy.architecture, subject.model.config
    if config.model_type != FAMILY:
        return f"the page has a forward pass of RecurrentGemma in JavaScript, and none of {architecture}"
    if subject.tokenizer is None or not is_toy(subject.tokenizer):
        return "the page can tokenize the toy language only"
    if subject.anatomy.parameters > MOST_PARAMETERS:
        return f"{subject.anatomy.parameters:,} parameters are more than the {MOST_PARAMETERS:,} that fit into the page"
    if config.hidden_activation != ACTIVATION or not config.tie_word_embeddings:
        return f"the page's forward pass has {ACTIVATION} and tied embeddings only"
    sizes = {name: tuple(parameter.shape) for name, parameter in subject.model.named_parameters()}
    width = config.num_attention_heads * config.head_dim
    if any(name.endswith("q_proj.weight") and shape[0] != width for name, shape in sizes.items()):
        return "heads were pruned, and the page's forward pass has as many heads in every layer"
    return ""


def _config(model: Any) -> dict[str, Any]:
    config = model.config
    rope = config.rope_parameters
    return {
        "layers": ["attention" if kind == "sliding_attention" else "recurrent" for kind in config.layers_block_type],
        "hidden": config.hidden_size,
        "vocabulary": config.vocab_size,
        "heads": config.num_attention_heads,
        "kvHeads": config.num_key_value_heads,
        "headDim": config.head_dim,
        "rotary": int(config.head_dim * rope.get("partial_rotary_factor", 1.0)),
        "theta": rope["rope_theta"],
        "attentionBias": config.attention_bias,
        "window": config.attention_window_size,
        "width": config.lru_width,
        "blocks": config.num_attention_heads,
        "taps": config.conv1d_width,
        "epsilon": config.rms_norm_eps,
        "softCap": config.logits_soft_cap,
        "embeddingScale": float(model.model.normalizer),
    }
