"""The doctor passes healthy models of every family, and each fault fails the law that is there for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import masking_utils
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama
from typer.testing import CliRunner

import cases
import needlework as nw
from needlework.checks import Checkup
from needlework.checks import doctor as doctor_module
from needlework.checks.case import Case
from needlework.cli import app
from needlework.engine import engine
from needlework.model import attention
from needlework.model.families import Family
from needlework.model.memory import Memory
from needlework.tasks import prompts

sys.path.insert(0, str(Path(__file__).parents[1] / "tasks"))
import token_kinds

HEADS = {"k = all", "k = 0", "heads act", "window"}
WINDOWS = ("recurrent_gemma", "zaya", "inkling", "gemma3", "lfm3")


def examined(subject: nw.Subject, *laws: str) -> Checkup:
    """What the doctor finds, of these laws alone where some are named."""
    every = doctor_module.LAWS
    chosen = {law: every[law] for law in laws or every}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor_module, "LAWS", chosen)
        return nw.doctor(subject, quick=True)


def failed(subject: nw.Subject, *laws: str) -> set[str]:
    return {check.law for check in examined(subject, *laws).failed}


def llama(**changes: Any) -> nw.Subject:
    """A model of one's own to break."""
    return nw.wrap(cases.build("llama", **changes))


# --- healthy models -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@cases.each(cases.ALL)
def test_healthy_models_pass_or_say_why_a_law_does_not_apply(name: str) -> None:
    found = nw.doctor(cases.subject(name))
    assert [f"{check.law}: {check.why}" for check in found.failed] == []
    idle = {check.law for check in found.checks if check.outcome == "does not apply"}
    expected = {"spans", "chat spans"}
    expected |= HEADS if name in cases.NO_HEADS else set() if name in WINDOWS else {"window"}
    expected |= {"memory acts"} if name in cases.NO_MIXER else set()
    expected |= {"reached"} if name == "inkling" else set()  # its convolutions cannot be silenced by themselves
    assert idle == expected
    assert all(check.why for check in found.checks)
    assert found.sound
    if name in ("zamba2", "nemotron_h"):
        assert "clamps the time step" in found["decode"].why
        assert found["decode"].measured > 1e-3  # type: ignore[operator]


def test_the_model_is_as_it_was_afterwards() -> None:
    subject = cases.subject("recurrent_gemma")
    before = (subject.model.config._attn_implementation, subject.logits([cases.PROMPT]))
    random = torch.get_rng_state()
    nw.doctor(subject, quick=True)
    assert torch.equal(random, torch.get_rng_state())
    assert subject.model.config._attn_implementation == before[0]
    assert torch.equal(subject.logits([cases.PROMPT]), before[1])
    assert all(getattr(m, "conv1d_state", None) is None for m in subject.model.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "recurrent_gemma", pytest.param("lfm2_moe", marks=pytest.mark.slow)])
def test_half_precision_has_tolerances_of_its_own(name: str, dtype: torch.dtype) -> None:
    found = nw.doctor(nw.wrap(cases.build(name).to(dtype)), quick=True)
    assert [f"{check.law}: {check.why}" for check in found.failed] == []
    assert found["k = all"].allowed > 0.01  # type: ignore[operator]


def test_a_checkup_is_a_value() -> None:
    found = nw.doctor(cases.subject("llama"), quick=True)
    assert Checkup.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert found.quick
    assert found.versions["needlework"] == nw.__version__
    assert "all " in str(found)
    assert found.verdict() in str(found)


# --- faults of models ---------------------------------------------------------------------------------------------------


def test_a_model_that_sees_later_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def everything(**given: Any) -> Any:
        config, x, mask = given["config"], given["inputs_embeds"], given.get("attention_mask")
        return masking_utils.create_bidirectional_mask(config=config, inputs_embeds=x, attention_mask=mask)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", everything)
    model = cases.build("llama")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    found = examined(nw.wrap(model), "causal")
    assert not found.sound
    assert found["causal"].why == "transformers' own forward: tokens that come later change the logits before them"


def test_bert_is_not_causal() -> None:
    """A class that transformers loads as a causal language model, and that is none unless it is told so."""
    config = transformers.BertConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, is_decoder=False
    )
    torch.manual_seed(0)
    subject = nw.wrap(transformers.BertLMHeadModel._from_config(config, attn_implementation="sdpa"))
    assert "causal" in failed(subject, "causal")


def _own_attention(module: nn.Module, hidden_states: Any, position_embeddings: Any, *_: Any, **more: Any) -> Any:
    """An attention that never asks transformers which function to use."""
    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    q, k, v = (project(hidden_states).view(shape).transpose(1, 2) for project in (module.q_proj, module.k_proj, module.v_proj))
    q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
    if (cache := more.get("past_key_values")) is not None:
        k, v = cache.update(k, v, module.layer_idx)
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    out, _ = sdpa_attention_forward(module, q, k, v, mask[None, None], scaling=module.scaling)
    return module.o_proj(out.flatten(2)), None


def test_a_layer_that_never_asks_for_our_function() -> None:
    model = cases.build("llama")
    layer = model.model.layers[1].self_attn
    layer.forward = lambda *args, **more: _own_attention(layer, *args, **more)
    subject = nw.wrap(model)
    assert len(subject.anatomy.attention_layers) == 3  # nothing else says that a layer is missing
    assert failed(subject, "idle is stock", "causal", "reached", "heads act") == {"reached"}


def test_a_layer_that_does_not_use_what_our_function_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receipt is whole, and nothing happens."""
    model = cases.build("llama")
    layer = model.model.layers[2].self_attn
    stock = layer.forward

    def deaf(hidden_states: Any, position_embeddings: Any, *args: Any, **more: Any) -> Any:
        stock(hidden_states, position_embeddings, *args, **{**more, "past_key_values": None})
        return _own_attention(layer, hidden_states, position_embeddings, **more)

    layer.forward = deaf
    found = examined(nw.wrap(model), "reached", "heads act")
    assert {check.law for check in found.failed} == {"reached", "heads act"}
    assert found["heads act"].why.startswith("layer 2: ")


def test_a_cache_that_loses_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    update = DynamicLayer.update

    def forgetful(self: Any, keys: Any, values: Any, *args: Any, **more: Any) -> Any:
        continued = self.get_seq_length() > 0
        keys, values = update(self, keys, values, *args, **more)
        if continued:
            self.values[:, :, 3] = 0
        return keys, values

    subject = llama()
    monkeypatch.setattr(DynamicLayer, "update", forgetful)
    assert failed(subject, "idle is stock", "causal", "decode") == {"decode"}


def test_a_recurrent_state_that_is_lost_when_a_prompt_goes_on() -> None:
    """Jamba's own code drops it; here the table of families says that it does not."""
    subject = nw.wrap(cases.build("jamba"), kernels="stock")
    subject.body.family = Family(continues=True)
    assert failed(subject, "idle is stock", "decode", "continued") == {"continued"}


def test_a_layer_that_mixes_the_rows_of_a_batch() -> None:
    model = cases.build("llama")
    model.model.layers[1].register_forward_hook(lambda module, args, out: out + 0.1 * out.mean(0, keepdim=True) * (len(out) > 1))
    assert failed(nw.wrap(model), "idle is stock", "causal", "decode", "forks", "batch") == {"forks", "batch"}


@pytest.mark.parametrize("more", [1, -1])
def test_a_window_that_is_off_by_one_in_the_mask(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    overlay = masking_utils.sliding_window_overlay
    monkeypatch.setattr(masking_utils, "sliding_window_overlay", lambda size: overlay(size + more))
    found = examined(nw.wrap(cases.build("gemma3")), "idle is stock", "window")
    assert [check.law for check in found.failed] == ["window"]
    assert f"shows {'more' if more > 0 else 'fewer'} than 8 keys" in found["window"].why


def test_a_window_that_is_not_the_configured_one() -> None:
    model = cases.build("gemma3")
    model.config.sliding_window = 9
    found = examined(nw.wrap(model), "window")
    assert not found.sound


def test_a_window_that_is_off_by_one_where_rows_share_keys() -> None:
    subject = nw.wrap(cases.build("gemma3"))
    subject.body._windows = {layer: window and window + 1 for layer, window in subject.body._windows.items()}
    assert failed(subject, "idle is stock", "window") == {"window"}


# --- faults of our own ----------------------------------------------------------------------------------------------------


def test_idle_that_is_not_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    sdpa = attention._sdpa
    monkeypatch.setattr(attention, "_sdpa", lambda *given: sdpa(*given) * 1.02)
    assert failed(llama(), "idle is stock", "decode") == {"idle is stock"}


def test_attention_of_our_own_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = attention.OwnKeys.scores
    monkeypatch.setattr(attention.OwnKeys, "scores", lambda *given: scores(*given) * 1.5)
    found = examined(llama(), "idle is stock", "k = all", "decode")
    assert [check.law for check in found.failed] == ["k = all"]
    assert "differs from LlamaForCausalLM's own" in found["k = all"].why


def test_keeping_none_that_keeps_one(monkeypatch: pytest.MonkeyPatch) -> None:
    count = nw.KeepHeads.count
    monkeypatch.setattr(nw.KeepHeads, "count", lambda self, heads: max(1, count(self, heads)))
    assert failed(llama(), "k = all", "k = 0", "heads act") == {"k = 0"}


def test_memory_that_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("needlework.model.mixers._MixerHooks.leave", lambda *_: None)
    found = examined(nw.wrap(cases.build("jamba")), "heads act", "memory acts")
    assert [check.law for check in found.failed] == ["memory acts"]
    assert "states_cut is 0" in found["memory acts"].why


def test_rows_that_read_another_prompts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    share = Memory.share
    monkeypatch.setattr(Memory, "share", lambda self, rows, *more: share(self, rows.roll(1), *more))
    assert failed(llama(), "idle is stock", "decode", "batch") == {"batch"}


def test_answers_that_are_not_the_first_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = engine.choose

    def second(logits: Any, tracks: Any) -> Any:
        if not any(track.prepared.request.forced for track in tracks):
            logits = logits.scatter(1, logits.argmax(-1, keepdim=True), -1e4)
        return choose(logits, tracks)

    monkeypatch.setattr(engine, "choose", second)
    assert failed(llama(), "idle is stock", "decode", "forks", "greedy") == {"greedy"}


def test_logits_that_are_no_numbers() -> None:
    model = cases.build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    assert failed(nw.wrap(model)) >= {"idle is stock", "causal", "decode", "forks", "batch", "greedy"}


def test_logits_that_are_no_numbers_in_one_of_two_ways_fail_k_all(monkeypatch: pytest.MonkeyPatch) -> None:
    read = nw.Subject.logits

    def broken(self: nw.Subject, prompts: Any, act: Any = nw.NONE, **options: Any) -> Any:
        return read(self, prompts, act, **options) * (float("nan") if "limit_context" in str(act) else 1.0)

    monkeypatch.setattr(nw.Subject, "logits", broken)
    assert failed(llama(), "k = all") == {"k = all"}


@pytest.mark.parametrize("broken", [0, 2])  # comparison of two idle answers, or of the second layer's ablation
def test_effects_that_are_no_numbers_fail(monkeypatch: pytest.MonkeyPatch, broken: int) -> None:
    effects = [0.0, 1.0, 1.0]
    effects[broken] = float("nan")
    left = iter(effects)
    monkeypatch.setattr(Case, "logprob_distance", lambda *_: next(left, 1.0))
    assert failed(llama(), "heads act") == {"heads act"}


# --- tokenizers and templates ---------------------------------------------------------------------------------------------


def spoken(tokenizer: Any) -> nw.Subject:
    return nw.wrap(cases.build("llama", vocab_size=1000), tokenizer)


@pytest.mark.parametrize("kind", token_kinds.KINDS)
@pytest.mark.parametrize("chat", [False, True])
def test_spans_line_up_in_tokenizers_of_every_kind(kind: str, chat: bool) -> None:
    found = examined(spoken(token_kinds.make(kind, chat=chat)), "spans", "chat spans")
    assert found["spans"].outcome == "pass", found["spans"].why
    assert found["chat spans"].outcome == ("pass" if chat else "does not apply"), found["chat spans"].why
    shown = next(line for line in found["spans"].shown if line.startswith("needle"))
    assert "sandwich" in shown.replace("' '", "").replace(" ", "")


def test_a_span_that_is_off_by_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code that places needles checks itself; this finds them by decoding, whatever that code says."""
    placed = prompts._verified
    shifted = lambda *given: tuple(edge + 1 for edge in placed(*given))  # noqa: E731
    monkeypatch.setattr(prompts, "_verified", shifted)
    found = examined(spoken(token_kinds.make("byte", chat=True)), "spans", "chat spans")
    assert {check.law for check in found.failed} == {"spans", "chat spans"}
    assert "decoding finds the needle in" in found["spans"].why


@pytest.mark.parametrize(
    "template, words",
    [
        (token_kinds.CHAT.replace("m.content | trim", "m.content | replace('sandwich', 'salad')"), "changes the user's words"),
        (token_kinds.CHAT.replace("{{ m.content | trim }}", "{{ m.content }} {{ m.content }}"), "2 times"),
        (token_kinds.CHAT.replace("<s>", "<s><s>"), "BOS twice"),
    ],
)
def test_chat_templates_that_move_a_needle(template: str, words: str) -> None:
    tokenizer = token_kinds.make("byte", chat=True)
    before, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        found = examined(spoken(tokenizer), "spans", "chat spans")
    finally:
        tokenizer.chat_template = before
    assert [check.law for check in found.failed] == ["chat spans"]
    assert words in found["chat spans"].why


def test_a_prompt_that_is_not_what_the_template_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The template's own tokens, asked for again, are not those of the prompt: here it says something of the day."""
    tokenizer = token_kinds.make("byte", chat=True)
    apply = type(tokenizer).apply_chat_template

    def moody(self: Any, *args: Any, tokenize: bool = True, **more: Any) -> Any:
        if tokenize:
            self.chat_template = token_kinds.CHAT.replace("[bot]", "[end][bot]")
        try:
            return apply(self, *args, tokenize=tokenize, **more)
        finally:
            self.chat_template = token_kinds.CHAT

    monkeypatch.setattr(type(tokenizer), "apply_chat_template", moody)
    found = examined(spoken(tokenizer), "chat spans")
    assert "not what the chat template gives" in found["chat spans"].why


def test_offsets_that_are_wrong() -> None:
    tokenizer = token_kinds.make("byte")

    class Shifted:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, *args: Any, **more: Any) -> Any:
            made = tokenizer(*args, **more)
            if "offset_mapping" in made:
                made["offset_mapping"] = [(a + 7, b + 7) for a, b in made["offset_mapping"]]
            return made

    assert failed(spoken(Shifted()), "spans") == {"spans"}


# --- the command ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_says_what_holds_and_ends_accordingly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = CliRunner()
    cases.subject("llama").model.save_pretrained(tmp_path)
    shown = run.invoke(app, ["doctor", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "LlamaForCausalLM: all 11 laws hold; 4 do not apply" in shown.output
    asked = run.invoke(app, ["doctor", str(tmp_path), "--json", "--dtype", "float32"])
    content = json.loads(asked.stdout)
    assert content["sound"] is True
    assert {check["outcome"] for check in content["checks"]} == {"pass", "does not apply"}
    sdpa = attention._sdpa
    monkeypatch.setattr(attention, "_sdpa", lambda *given: sdpa(*given) * 1.02)
    broken = run.invoke(app, ["doctor", str(tmp_path)])
    assert broken.exit_code == 1
    assert "believe no number" in broken.output
    missing = run.invoke(app, ["doctor", str(tmp_path / "nowhere")])
    assert missing.exit_code == 2
