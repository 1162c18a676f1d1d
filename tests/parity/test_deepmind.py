"""RecurrentGemma against DeepMind's own torch code: the same random weights, and heads chosen from *their* probabilities."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

import needlework as nw

WINDOW, HEADS, LAYERS, WIDTH, VOCABULARY = 8, 8, 6, 64, 97
PROMPT, TOKENS = 29, 41  # the prompt alone is more than three windows long
TOLERANCE = 2e-5  # on logits up to 20 in size; float32 through two implementations
MARGIN = 1e-5  # closer scores could be ordered either way by rounding; the weights are such that none are


def _deepmind() -> SimpleNamespace:
    """The modules of DeepMind's torch part, imported without running the packages' own `__init__`.

    `recurrentgemma/__init__.py` imports jax and flax, `recurrentgemma/torch/__init__.py` imports sentencepiece for the
    sampler. The model needs none of them, so bare packages that only know their directory take their place.
    """
    found = importlib.util.find_spec("recurrentgemma")
    assert found is not None
    assert found.submodule_search_locations is not None
    root = Path(next(iter(found.submodule_search_locations)))
    for name, directory in (("recurrentgemma", root), ("recurrentgemma.torch", root / "torch")):
        package = ModuleType(name)
        package.__path__ = [str(directory)]
        sys.modules.setdefault(name, package)
    names = ("common", "torch.griffin", "torch.modules")
    return SimpleNamespace(**{n.rpartition(".")[2]: importlib.import_module(f"recurrentgemma.{n}") for n in names})


@dataclass
class Chooser:
    """Zeroes head outputs inside DeepMind's attention by a score of the probabilities that it has just computed."""

    k: int | None = None  # None: hands off
    by: Literal["entropy", "l2"] = "entropy"
    margins: list[float] = field(default_factory=list)
    zeroed: int = 0

    def choose(self, p: Tensor, outputs: Tensor) -> Tensor:
        """Probabilities [rows, heads, queries, keys] and outputs [rows, queries, heads, dim]."""
        if self.k is None:
            return outputs
        score = p.mul(p.clamp_min(1e-45).log()).sum(-1) if self.by == "entropy" else p.square().sum(-1).sqrt()
        kept = torch.zeros(p.shape[:3], dtype=torch.bool)
        for row, query in torch.cartesian_prod(torch.arange(p.shape[0]), torch.arange(p.shape[2])).tolist():
            numbers = score[row, :, query].tolist()
            order = sorted(range(len(numbers)), key=lambda h: (-numbers[h], h))  # ties go to the lower head
            kept[row, order[: self.k], query] = True
            if 0 < self.k < len(order) and len(set(numbers)) > 1:  # at position 0 all heads are tied, exactly
                self.margins.append(numbers[order[self.k - 1]] - numbers[order[self.k]])
        self.zeroed += int((~kept).sum())
        return outputs * kept.transpose(1, 2)[..., None]


@dataclass(frozen=True)
class Griffin:
    """DeepMind's model with a chooser inside, fed as needlework feeds its own: a prefill, then token by token."""

    model: Any
    modules: ModuleType

    @contextmanager
    def _patched(self, chooser: Chooser) -> Iterator[None]:
        real = self.modules.einops  # type: ignore[attr-defined]

        def einsum(*args: Any) -> Tensor:
            out: Tensor = real.einsum(*args)
            if args[-1] != "b n t s, b s n h -> b t n h":
                return out
            seen.append(args[0])
            return chooser.choose(args[0], out)

        seen: list[Tensor] = []
        self.modules.einops = SimpleNamespace(rearrange=real.rearrange, einsum=einsum)  # type: ignore[attr-defined]
        try:
            yield
            assert seen, "DeepMind's attention no longer mixes values where this test looks for it"
        finally:
            self.modules.einops = real  # type: ignore[attr-defined]

    @torch.inference_mode()
    def run(self, ids: Tensor, new: int, prefill: tuple[int, int | None], decode: int | None, **how: Any) -> Run:
        """Logits of all tokens of `ids` and of `new` greedy ones; `prefill` is (tokens, heads kept there)."""
        chooser, split = Chooser(**how), prefill[0]
        rows, parts, cache = ids.shape[0], [], None
        with self._patched(chooser):
            if split:
                chooser.k = prefill[1]
                out, cache = self.model(ids[:, :split], torch.arange(split).expand(rows, -1), cache)
                parts.append(out)
            chooser.k = decode
            for t in range(split, ids.shape[1] + new):
                if t == ids.shape[1]:
                    ids = torch.cat([ids, parts[-1][:, -1:].argmax(-1)], 1)
                out, cache = self.model(ids[:, t : t + 1], torch.full((rows, 1), t), cache)
                parts.append(out)
        logits = torch.cat(parts, 1)
        return Run(logits, torch.cat([ids, logits[:, -1:].argmax(-1)], 1), chooser)


@dataclass
class Run:
    logits: Tensor
    ids: Tensor  # what was fed, and the next token
    chooser: Chooser

    def check_margins(self) -> None:
        """The comparison means nothing where rounding could decide; the weights are chosen so that it nowhere does."""
        assert min(self.chooser.margins, default=1.0) > MARGIN


@dataclass(frozen=True)
class Pair:
    """One set of random weights in DeepMind's code and in a directory that transformers wrote."""

    griffin: Griffin
    directory: Path

    @functools.cache  # noqa: B019 (lives as long as the module's tests)
    def subject(self, window: str = "deepmind", kernels: Literal["fast", "stock"] = "fast") -> nw.Subject:
        return nw.load(self.directory, window=window, kernels=kernels)


def _renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """DeepMind's names and layouts as transformers' own."""
    names = {
        "embedder.input_embedding": "embed_tokens.weight",
        "blocks": "layers",
        "scale": "weight",
        "recurrent_block": "temporal_block",
        "attention_block": "temporal_block",
        "proj_q": "q_proj",
        "proj_k": "k_proj",
        "proj_v": "v_proj",
        "proj_final": "o_proj",
        "ffw_down": "down_proj",
        "conv_1d.w": "conv_1d.weight",
        "conv_1d.b": "conv_1d.bias",
        "a_param": "recurrent_param",
        "input_gate.w": "input_gate_weight",
        "input_gate.b": "input_gate_bias",
        "a_gate.w": "recurrent_gate_weight",
        "a_gate.b": "recurrent_gate_bias",
    }
    new = {}
    for old, tensor in weights.items():
        name = f"model.{old}"
        for theirs, ours in names.items():
            parts = f".{name}.".replace(f".{theirs}.", f".{ours}.")
            name = parts.strip(".")
        if "conv_1d.weight" in name:
            tensor = tensor.T[:, None]  # [time, width] -> [width, 1, time]
        if "ffw_up" in name:  # [2, width, inner]: the gate, then the value
            stem = name.rpartition(".ffw_up.")[0]
            for half, layer in enumerate(("gate_proj", "up_proj")):
                part = tensor[half].T if name.endswith("w") else tensor[half].flatten()
                new[f"{stem}.{layer}.{'weight' if name.endswith('w') else 'bias'}"] = part.contiguous()
            continue
        new[name] = tensor.contiguous()
    return new


@pytest.fixture(scope="module")
def pair(witness: Callable[[str], None], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    witness("recurrentgemma")
    deepmind = _deepmind()
    kind = deepmind.common.TemporalBlockType
    torch.manual_seed(20)
    griffin = deepmind.griffin.Griffin(
        deepmind.common.GriffinConfig(
            vocab_size=VOCABULARY,
            width=WIDTH,
            mlp_expanded_width=96,
            num_heads=HEADS,
            block_types=(kind.RECURRENT, kind.RECURRENT, kind.ATTENTION) * (LAYERS // 3),
            embeddings_scale_by_sqrt_dim=True,
            attention_window_size=WINDOW,
            logits_soft_cap=30.0,
            lru_width=WIDTH,
        ),
        gradient_checkpointing=False,
    ).eval()
    with torch.no_grad():  # their initialisation leaves norms and biases at zero, and a swapped pair would not show
        for name, weight in griffin.named_parameters():
            if name.endswith((".scale", ".b", ".bias")):
                weight.normal_(std=0.2)
            if "proj_q" in name or "proj_final" in name:
                weight.mul_(3.0)  # heads that differ from each other, and whose loss shows in the logits
    config = RecurrentGemmaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=192,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        num_hidden_layers=LAYERS,
        attention_window_size=WINDOW,
        lru_width=WIDTH,
        logits_soft_cap=30.0,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=None,
    )
    model = RecurrentGemmaForCausalLM(config)
    state = _renamed(dict(griffin.state_dict()))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    directory = tmp_path_factory.mktemp("recurrent_gemma")
    model.save_pretrained(directory)
    return Pair(Griffin(griffin, deepmind.modules), directory)


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(1, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(7))


def _close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kernels", ["fast", "stock"])
def test_plain_logits_agree_past_the_window(pair: Pair, ids: Tensor, kernels: Literal["fast", "stock"]) -> None:
    theirs = pair.griffin.run(ids, 0, (TOKENS, None), None).logits
    subject = pair.subject(kernels=kernels)
    _close(subject.logits(ids), theirs)
    _close(subject.logits(ids, prompt_tokens=PROMPT), theirs)
    assert subject.anatomy.window == WINDOW + 1  # DeepMind's 8 shows 9 keys: the token's own and 8 before it


def test_plain_greedy_tokens_agree(pair: Pair, ids: Tensor) -> None:
    prompt = ids[:, :PROMPT]
    theirs = pair.griffin.run(prompt, 19, (PROMPT - 1, None), None)
    top = theirs.logits[:, PROMPT - 1 :].topk(2).values
    assert (top[..., 0] - top[..., 1]).min() > 10 * TOLERANCE
    answers = pair.subject().generate(prompt.tolist(), max_new_tokens=20)
    assert [list(answer.tokens) for answer in answers] == theirs.ids[:, PROMPT:].tolist()


def test_transformers_window_shows_one_key_less(pair: Pair, ids: Tensor) -> None:
    theirs = pair.griffin.run(ids, 0, (TOKENS, None), None).logits
    subject = pair.subject(window="transformers")
    assert subject.anatomy.window == WINDOW
    for ours in (subject.logits(ids), subject.logits(ids, prompt_tokens=5)):
        gap = (ours - theirs).abs().amax((0, 2))  # by position
        assert gap[:WINDOW].max() < TOLERANCE  # position 7 sees all eight tokens either way
        assert gap[WINDOW] > 1e-2  # position 8 sees nine in DeepMind's code, eight in transformers
        assert gap[WINDOW:].min() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["prefill", "decode", "both"])
@pytest.mark.parametrize("k", [0, 1, 2, 5, 7, 8])
def test_heads_kept_by_entropy_agree(pair: Pair, ids: Tensor, k: int, phase: Literal["prefill", "decode", "both"]) -> None:
    kept = (k if phase != "decode" else None), (k if phase != "prefill" else None)
    theirs = pair.griffin.run(ids, 0, (PROMPT - 1, kept[0]), kept[1])
    theirs.check_margins()
    ours = pair.subject().logits(ids, nw.KeepHeads(k=k, phase=phase), prompt_tokens=PROMPT)
    _close(ours, theirs.logits)
    plain = pair.griffin.run(ids, 0, (PROMPT - 1, None), None).logits
    acted = {"prefill": slice(0, PROMPT - 1), "decode": slice(PROMPT - 1, TOKENS), "both": slice(0, TOKENS)}[phase]
    assert theirs.chooser.zeroed == (HEADS - k) * len(ids) * (LAYERS // 3) * (acted.stop - acted.start)
    changed = (theirs.logits - plain).abs().amax((0, 2))[acted] > 1e-2
    assert bool(changed.all()) if k < HEADS else not bool(changed.any())


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["decode", "both"])
@pytest.mark.parametrize("k", [1, 3])
def test_greedy_tokens_with_heads_kept_agree(pair: Pair, ids: Tensor, k: int, phase: Literal["decode", "both"]) -> None:
    prompt = ids[:, :PROMPT]
    theirs = pair.griffin.run(prompt, 19, (PROMPT - 1, k if phase == "both" else None), k)
    theirs.check_margins()
    answers = pair.subject().generate(prompt.tolist(), nw.KeepHeads(k=k, phase=phase), max_new_tokens=20)
    assert [list(answer.tokens) for answer in answers] == theirs.ids[:, PROMPT:].tolist()
    zeroed = sum(answer.receipt.total("heads_zeroed") for answer in answers)
    assert zeroed == theirs.chooser.zeroed
    plain = pair.griffin.run(prompt, 19, (PROMPT - 1, None), None)
    assert plain.ids.tolist() != theirs.ids.tolist()


def test_heads_kept_by_2_norm_agree(pair: Pair, ids: Tensor) -> None:
    theirs = pair.griffin.run(ids, 0, (PROMPT - 1, 3), 3, by="l2")
    theirs.check_margins()
    _close(pair.subject().logits(ids, nw.KeepHeads(k=3, by="l2", phase="both"), prompt_tokens=PROMPT), theirs.logits)


def test_scoring_is_one_prefill(pair: Pair, ids: Tensor) -> None:
    theirs = pair.griffin.run(ids, 0, (TOKENS, 2), None)
    theirs.check_margins()
    _close(pair.subject().logits(ids, nw.KeepHeads(k=2, phase="prefill")), theirs.logits)


def test_last_prompt_token_can_belong_to_prefill(pair: Pair, ids: Tensor) -> None:
    """As the paper says: transformers' own `generate` gives the first answer token from a prefill that nothing touched."""
    theirs = pair.griffin.run(ids, 0, (PROMPT, None), 1)
    theirs.check_margins()
    ours = pair.subject().logits(ids, nw.KeepHeads(k=1, phase="decode"), prompt_tokens=PROMPT, boundary="prefill")
    _close(ours, theirs.logits)


def test_inside_the_window(pair: Pair, ids: Tensor) -> None:
    """A prompt of four tokens, so that the cache fills and starts to turn over while decoding."""
    theirs = pair.griffin.run(ids[:, :20], 0, (3, None), 2)
    theirs.check_margins()
    _close(pair.subject().logits(ids[:, :20], nw.KeepHeads(k=2, phase="decode"), prompt_tokens=4), theirs.logits)
