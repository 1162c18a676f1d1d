"""The recurrent side: a cut memory, a dropped mixer and a reset state, against constructions that need no intervention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cases
import needlework as nw

IDS = cases.tokens(2, 12, seed=3)
PURE = ("mamba", "mamba2", "falcon_mamba")
ALONE = nw.AblateRecurrent() + nw.AblateAttention()
# RG-LRU scales its input otherwise at position 0 of a sequence; an emptied memory does not move a token to position 0.
SCALED_AT_START = ("recurrent_gemma",)
# Their sparse attention may not choose the query's own key, so a lone token is no reference for LimitContext(tokens=1).
INDEXED = ("glm5_next", "qwen4_exp")


def _one_by_one(subject: nw.Subject, intervention: nw.Intervention = nw.NONE) -> Tensor:
    """Logits of every token as if it were a whole sequence."""
    alone = [subject.logits(IDS[:, t : t + 1], intervention) for t in range(IDS.shape[1])]
    return torch.cat(alone, 1)


@cases.each(PURE)
def test_without_memory_every_token_is_a_sequence_of_its_own(name: str) -> None:
    """No attention and no positions: a Mamba without memory is the stock model on single tokens."""
    subject = cases.subject(name)
    cut = subject.logits(IDS, nw.AblateRecurrent())
    assert cases.apart(cut, _one_by_one(subject)) < 1e-4
    assert cases.apart(cut[:, 1:], subject.logits(IDS)[:, 1:]) > 0.1


@cases.each(tuple(name for name in cases.HYBRIDS if name not in SCALED_AT_START))
def test_without_memory_and_keys_every_token_is_a_sequence_of_its_own(name: str) -> None:
    """Attention on its own key alone, mixers on their own token alone: the stock model on single tokens."""
    subject = cases.subject(name)
    if name in INDEXED:
        cut, alone = subject.logits(IDS, ALONE), _one_by_one(subject, nw.AblateAttention())
    else:
        cut = subject.logits(IDS, nw.AblateRecurrent() + nw.LimitContext(tokens=1))
        alone = _one_by_one(subject)
    assert cases.apart(cut, alone) < cases.between_routes(name)


def _empty(block: Any) -> None:
    """The states of a stock RecurrentGemma block as they are when nothing has been read."""
    block.conv1d_state = torch.zeros(IDS.shape[0], 32, block.conv1d_width - 1)
    block.rg_lru.recurrent_states = torch.zeros(IDS.shape[0], 32)


def _lone(name: str, module: Any, hidden: Tensor, t: int) -> Tensor:
    """A stock mixer on one token and nothing else."""
    if name != "recurrent_gemma":
        return module.forward(hidden[:, t : t + 1])
    _empty(module)
    return module.forward(hidden[:, t : t + 1], torch.tensor([[t]]), None)[0]


@pytest.mark.parametrize("name", ["jamba", "recurrent_gemma", "bamba", "qwen3_next"])
def test_a_cut_mixer_reads_each_token_alone(name: str) -> None:
    """With attention at work: an independent hook calls the stock mixer token by token on what really enters it."""
    subject = cases.subject(name)

    def alone(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        joined = torch.cat([_lone(name, module, hidden, t) for t in range(hidden.shape[1])], 1)
        return (joined, *output[1:]) if isinstance(output, tuple) else joined

    modules: list[Any] = [subject.model.get_submodule(part.path) for _, part in subject.anatomy.recurrent_parts()]
    handles = [module.register_forward_hook(alone, with_kwargs=True) for module in modules]
    try:
        with torch.no_grad():
            positions = torch.arange(IDS.shape[1])[None]
            expected = subject.model(input_ids=IDS, position_ids=positions, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
        for module in modules if name == "recurrent_gemma" else ():
            module.conv1d_state = module.rg_lru.recurrent_states = None
    assert cases.apart(subject.logits(IDS, nw.AblateRecurrent()), expected) < 1e-4


def test_a_reset_of_recurrent_gemma_is_a_stock_block_with_empty_states() -> None:
    """The stock model, token by token, its two states emptied by hand before token 6."""
    subject = cases.subject("recurrent_gemma")
    blocks: list[Any] = [subject.model.get_submodule(part.path) for _, part in subject.anatomy.recurrent_parts()]
    cache, rows = subject.body.family.make_cache(subject.model.config), []
    with torch.no_grad():
        for t in range(IDS.shape[1]):
            for block in blocks if t in (0, 6) else ():
                _empty(block)
            here = torch.full((IDS.shape[0], 1), t)
            rows.append(subject.model(input_ids=IDS[:, t : t + 1], position_ids=here, past_key_values=cache).logits)
    for block in blocks:
        block.conv1d_state = block.rg_lru.recurrent_states = None
    assert cases.apart(subject.logits(IDS, nw.ResetState(at=6)), torch.cat(rows, 1)) < 1e-4


@cases.each(cases.WITH_MIXER)
def test_a_cut_memory_is_one_on_both_routes(name: str) -> None:
    subject = cases.subject(name)
    cut = nw.AblateRecurrent()
    whole = subject.logits(IDS, cut)
    for prompt_tokens in (1, 7):
        assert cases.apart(subject.logits(IDS, cut, prompt_tokens=prompt_tokens), whole) < cases.between_routes(name)


@cases.each(PURE)
def test_a_memory_cut_in_one_phase_is_whole_in_the_other(name: str) -> None:
    """Cut in prefill, decoding starts from nothing; cut in decode, the prompt has been read as ever."""
    subject, n = cases.subject(name), 8
    prefill, decode = (subject.logits(IDS, nw.AblateRecurrent(phase=phase), prompt_tokens=n) for phase in ("prefill", "decode"))
    assert cases.apart(prefill[:, n - 1 :], subject.logits(IDS[:, n - 1 :])) < 1e-4
    assert cases.apart(decode[:, : n - 1], subject.logits(IDS)[:, : n - 1]) < 1e-4
    assert cases.apart(decode[:, n - 1 :], _one_by_one(subject)[:, n - 1 :]) < 1e-4


@cases.each(cases.WITH_MIXER)
def test_a_dropped_mixer_is_a_module_that_says_nothing(name: str) -> None:
    subject = cases.subject(name)

    def nothing(module: nn.Module, args: Any, output: Any) -> Any:
        return (output[0] * 0, *output[1:]) if isinstance(output, tuple) else output * 0

    layers = [layer for layer, _ in subject.anatomy.recurrent_parts()][::2]
    handles = [
        subject.model.get_submodule(subject.anatomy.layers[i].recurrent.path).register_forward_hook(nothing)  # type: ignore[union-attr]
        for i in layers
    ]
    try:
        expected = subject.logits(IDS)
    finally:
        for handle in handles:
            handle.remove()
    dropped = nw.AblateRecurrent(site="block", layers=layers)
    assert cases.apart(subject.logits(IDS, dropped), expected) < 1e-5
    assert cases.apart(subject.logits(IDS, dropped, prompt_tokens=5), expected) < cases.between_routes(name)
    assert cases.apart(expected, subject.logits(IDS)) > 1e-2


@cases.each(PURE)
@pytest.mark.parametrize("at", [1, 5, 11])
def test_after_a_reset_a_mamba_has_seen_nothing(name: str, at: int) -> None:
    subject = cases.subject(name)
    reset = subject.logits(IDS, nw.ResetState(at=at))
    assert cases.apart(reset[:, at:], subject.logits(IDS[:, at:])) < 1e-4
    assert cases.apart(reset[:, :at], subject.logits(IDS)[:, :at]) < 1e-5


@cases.each(tuple(name for name in cases.HYBRIDS if name not in SCALED_AT_START))
def test_after_a_reset_the_recurrent_side_has_seen_nothing(name: str) -> None:
    """With attention off the rest of the sequence is all there is; with attention on, it still sees what came before."""
    subject, at = cases.subject(name), 5
    off, reset = nw.AblateAttention(), nw.ResetState(at=at)
    cleared = subject.logits(IDS, off + reset)
    assert cases.apart(cleared[:, at:], subject.logits(IDS[:, at:], off)) < cases.between_routes(name)
    assert cases.apart(cleared[:, :at], subject.logits(IDS, off)[:, :at]) < 1e-4
    with_attention = subject.logits(IDS, reset)
    assert cases.apart(with_attention[:, at:], subject.logits(IDS[:, at:])) > 1e-2


@cases.each(cases.WITH_MIXER)
def test_a_reset_is_one_on_both_routes(name: str) -> None:
    subject = cases.subject(name)
    whole = subject.logits(IDS, nw.ResetState(at=6))
    for prompt_tokens in (3, 9):  # the reset falls into decode, then into prefill
        stepwise = subject.logits(IDS, nw.ResetState(at=6), prompt_tokens=prompt_tokens)
        assert cases.apart(stepwise, whole) < cases.between_routes(name)


def test_resets_add_up_and_count() -> None:
    subject = cases.subject("mamba")
    twice = nw.ResetState(at=4) + nw.ResetState(at=8)
    assert cases.apart(subject.logits(IDS, twice)[:, 8:], subject.logits(IDS[:, 8:])) < 1e-4
    assert cases.apart(subject.logits(IDS, twice)[:, 4:8], subject.logits(IDS[:, 4:])[:, :4]) < 1e-4
    answer = subject.generate([cases.PROMPT], twice + nw.ResetState(at=12), max_new_tokens=3)[0]
    assert answer.receipt.total("states_cleared", "prefill") == 2 * 4
    assert answer.receipt.total("states_cleared", "decode") == 4


def test_a_reset_at_a_span_comes_after_its_last_token() -> None:
    subject = cases.subject("jamba")
    at_span = subject.logits(IDS, nw.ResetState(at="needle"), spans={"needle": ((2, 4), (6, 8))})
    assert torch.equal(at_span, subject.logits(IDS, nw.ResetState(at=4) + nw.ResetState(at=8)))


@pytest.mark.parametrize("at, phase", [(20, "prefill"), (3, "decode")])
def test_a_reset_in_the_wrong_phase_is_refused(at: int, phase: Any) -> None:
    """It would never act, and an intervention that cannot act must not look as if it had."""
    reset = nw.ResetState(at=at, phase=phase)
    with pytest.raises(nw.NeedleworkError, match="reset_state"):
        cases.subject("mamba").generate([cases.PROMPT], reset, max_new_tokens=12)


def test_a_reset_among_the_options_is_refused() -> None:
    """Options are read after the prompt; a position there is read by some options and not by others."""
    with pytest.raises(nw.NeedleworkError, match="reset_state"):
        cases.subject("mamba").choices([cases.PROMPT], [[(5, 6, 7, 8), (9,)]], nw.ResetState(at=13))


@cases.each(cases.WITH_MIXER)
def test_receipts_count_cuts_drops_and_resets(name: str) -> None:
    subject = cases.subject(name)
    layers = [layer for layer, _ in subject.anatomy.recurrent_parts()]
    steps, prompt = 3, len(cases.PROMPT)
    some = [nw.AblateRecurrent(), nw.AblateRecurrent(site="block", layers=layers[:1]), nw.ResetState(at=6)]
    cut, dropped, reset = subject.generate([cases.PROMPT] * 3, interventions=some, max_new_tokens=steps)
    read = len(cut.tokens)  # tokens decoded: the last prompt token, then every answer token but the last
    for layer in layers:
        assert cut.receipt.total("states_cut", "prefill", layer) == prompt - 1
        assert cut.receipt.total("states_cut", "decode", layer) == read
        assert reset.receipt.total("states_cleared", layer=layer) == 1
    assert dropped.receipt.total("blocks_dropped", "prefill") == prompt - 1
    assert dropped.receipt.total("blocks_dropped", layer=layers[0]) == prompt - 1 + len(dropped.tokens)


@cases.each(("mamba2", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "zamba2"))
def test_lone_tokens_are_not_padded_to_a_chunk_and_leave_no_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mamba-2 pads a sequence to whole chunks, 256 tokens in published models: 255 of 256 for nothing where each stands alone."""
    subject = cases.subject(name)
    mixers = [module for module in subject.model.modules() if isinstance(getattr(module, "chunk_size", None), int)]
    before = [module.chunk_size for module in mixers]
    assert mixers
    assert min(before) > 1
    kind = type(mixers[0])
    stock = kind.forward
    seen = []

    def noting(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((hidden_states.shape[1], self.chunk_size))
        if len(seen) == failing:
            raise RuntimeError("in the middle")
        return stock(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", noting)
    failing = 0
    subject.logits(IDS, nw.AblateRecurrent())
    assert set(seen) == {(IDS.shape[1], before[0]), (1, 1)}
    seen.clear()
    failing = 2
    with pytest.raises(RuntimeError, match="in the middle"):
        subject.logits(IDS, nw.AblateRecurrent())
    assert seen[-1] == (1, 1)
    assert [module.chunk_size for module in mixers] == before
