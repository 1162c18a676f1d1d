"""Patching, hidden states, the logit lens and blocked edges against nnsight, which reaches into stock models by other means."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import needlework as nw
from needlework.measure import make_samples
from needlework.tasks.base import Item, make_task

NAMES = ("tiny-griffin", "tiny-jamba", "llama")
PROMPTS = ((17, 45, 9, 80, 55, 41, 8, 64, 51, 90, 13, 37), (17, 45, 9, 71, 30, 22, 8, 64, 51, 90, 13, 37))  # of the llama
HEAD = 3  # of each attention layer: the one that is patched, zeroed or blinded


def _subject(name: str) -> nw.Subject:
    if name != "llama":
        return nw.load(name, kernels="stock")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    return nw.wrap(LlamaForCausalLM(config).eval(), kernels="stock")


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


def _like(output: Any, edited: Tensor) -> Any:
    return (edited, *output[1:]) if isinstance(output, tuple) else edited


class Witness:
    """A copy of the stock model with nnsight around it."""

    def __init__(self, subject: nw.Subject) -> None:
        from nnsight import NNsight

        self.anatomy, self.model = subject.anatomy, subject.model
        self.traced = NNsight(subject.model)

    def module(self, path: str) -> Any:
        module = self.traced
        for part in path.split("."):
            module = module[int(part)] if part.isdigit() else getattr(module, part)
        return module

    def part(self, site: str, layer: int) -> Any:
        parts = self.anatomy.layers[layer]
        if site == "layers":
            return self.traced.model.layers[layer]
        part = parts.recurrent if site in ("mixers", "recurrent") else parts.attention
        assert part is not None
        return self.module(part.path)

    def channels(self, layer: int, head: int) -> slice:
        """The head's part of the output projection's input."""
        width = self.anatomy.attention(layer).value_dim
        return slice(head * width, (head + 1) * width)

    @torch.inference_mode()
    def output(self, site: str, layer: int, clean: Tensor, corrupt: Tensor, positions: Sequence[int]) -> Tensor:
        """Set a module's output at some tokens of the corrupt prompt to that on the clean one."""
        module = self.part(site, layer)
        with self.traced.trace(input_ids=clean):
            saved = module.output.save()
        with self.traced.trace(input_ids=corrupt):
            given = module.output
            edited = _first(given).clone()
            edited[:, positions] = _first(saved)[:, positions]
            module.output = _like(given, edited)
            logits = self.traced.lm_head.output.save()
        return self.capped(logits)[0, -1]

    @torch.inference_mode()
    def head(self, layer: int, clean: Tensor, corrupt: Tensor, positions: Sequence[int]) -> Tensor:
        channels, module = self.channels(layer, HEAD), self.module(f"{self.anatomy.attention(layer).path}.o_proj")
        with self.traced.trace(input_ids=clean):
            saved = module.input.save()
        with self.traced.trace(input_ids=corrupt):
            edited = module.input.clone()
            edited[:, positions, channels] = saved[:, positions, channels]
            module.input = edited
            logits = self.traced.lm_head.output.save()
        return self.capped(logits)[0, -1]

    @torch.inference_mode()
    def memory(self, site: str, layer: int, clean: Tensor, corrupt: Tensor, positions: Sequence[int]) -> Tensor:
        """Swap what a module remembers of some tokens, for the last token alone.

        The module reads the clean prompt at these tokens, and what it gave to all tokens but the last is put back.
        """
        module = self.part(site, layer)
        with self.traced.trace(input_ids=clean):
            read = module.input.save()
        with self.traced.trace(input_ids=corrupt):
            own = module.output.save()
        with self.traced.trace(input_ids=corrupt):
            given = module.input.clone()
            given[:, positions] = read[:, positions]
            module.input = given
            gave = module.output
            edited = _first(gave).clone()
            edited[:, :-1] = _first(own)[:, :-1]
            module.output = _like(gave, edited)
            logits = self.traced.lm_head.output.save()
        return self.capped(logits)[0, -1]

    @torch.inference_mode()
    def streams(self, ids: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Return what enters and leaves the layers [layers + 1, tokens, width] with one head zeroed, and the logits."""
        module = self.module(f"{self.anatomy.attention(layer).path}.o_proj")
        count, saved = len(self.anatomy.layers), []
        with self.traced.trace(input_ids=ids):
            entered = self.traced.model.layers[0].input.save()
            for i in range(count):
                if i == layer:
                    edited = module.input.clone()
                    edited[..., self.channels(layer, HEAD)] = 0
                    module.input = edited
                saved.append(self.traced.model.layers[i].output.save())
            logits = self.traced.lm_head.output.save()
        return torch.stack([entered[0], *(_first(x)[0] for x in saved)]), self.capped(logits)[0]

    @torch.inference_mode()
    def read_out(self, streams: Tensor) -> Tensor:
        """Apply the model's own final norm, unembedding and cap to residual streams."""
        stack = self.model.model
        (norm,) = [m for name in ("norm", "final_layernorm", "final_norm") if (m := getattr(stack, name, None)) is not None]
        return self.capped(self.model.lm_head(norm(streams)))

    @torch.inference_mode()
    def blinded(self, layer: int, ids: Tensor, queries: Sequence[int], keys: Sequence[int]) -> Tensor:
        """Return logits with a causal mask of this layer's own, in which one head's queries do not see these keys."""
        module, heads = self.part("attention", layer), self.anatomy.attention(layer).query_heads
        count, hidden = ids.shape[1], torch.finfo(torch.float32).min
        mask = torch.full((count, count), hidden).triu(1).repeat(1, heads, 1, 1)
        mask[:, HEAD, torch.tensor(queries)[:, None], torch.tensor(keys)] = hidden
        with self.traced.trace(input_ids=ids):
            args, named = module.inputs
            module.inputs = (args, {**named, "attention_mask": mask})
            logits = self.traced.lm_head.output.save()
        return self.capped(logits)[0]

    @torch.inference_mode()
    def unconvolved(self, layer: int, ids: Tensor, queries: Sequence[int], sources: Sequence[int]) -> Tensor:
        """Return logits without what these sources add to the layer's convolution at these queries."""
        module = self.part("mixers", layer).conv_1d
        with self.traced.trace(input_ids=ids):
            read = module.input  # [1, channels, tokens]
            edited = module.output.clone()
            for i in queries:
                for j in sources:
                    if 0 < i - j < module.weight.shape[-1]:
                        edited[..., i] -= module.weight[:, 0, j - i - 1] * read[..., j]
            module.output = edited
            logits = self.traced.lm_head.output.save()
        return self.capped(logits)[0]

    def capped(self, logits: Tensor) -> Tensor:
        """The model's own last step: RecurrentGemma caps its logits."""
        cap = getattr(self.model.config, "logits_soft_cap", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)


class Case:
    """A model in two copies, ours and nnsight's, with a pair of prompts and the span in which these differ."""

    def __init__(self, name: str) -> None:
        self.subject, self.theirs = _subject(name), Witness(_subject(name))
        self.clean, self.corrupt = PROMPTS
        if name != "llama":
            item = sample(self.subject)
            self.clean, self.corrupt = item.prompt, item.twins["twin"]
        self.ids = [torch.tensor([prompt]) for prompt in (self.clean, self.corrupt)]
        differ = [i for i, (a, b) in enumerate(zip(self.clean, self.corrupt, strict=True)) if a != b]
        self.span = range(differ[0], differ[-1] + 1)
        self.spans = {"span": ((self.span.start, self.span.stop),)}
        logits = self.subject.logits([self.clean, self.corrupt])[:, -1]
        gap = logits[0] - logits[1]
        self.a, self.b = int(gap.argmax()), int(gap.argmin())
        self.attention = [layer.index for layer in self.subject.anatomy.attention_layers]

    def patched(self, *sites: str, at: Any) -> Iterator[tuple[Any, float]]:
        """Yield each row of the table, with the metric that it stands for."""
        answers = ((self.a,), (self.b,))
        table = nw.patch(self.subject, self.clean, self.corrupt, sites, at=at, answers=answers, spans=self.spans)
        for row in table.rows:
            yield row, table.corrupt + row.share.value * (table.clean - table.corrupt)

    def check(self, patched: Iterator[tuple[Any, float]], expected: Callable[[Any], Tensor]) -> int:
        """Compare the metric of all rows; return how many there were."""
        compared, moved = 0, 0.0
        before = float((x := self.subject.logits([self.corrupt])[0, -1])[self.a] - x[self.b])
        for row, value in patched:
            if row.head in (None, HEAD):
                logits = expected(row)
                assert value == pytest.approx(float(logits[self.a] - logits[self.b]), abs=1e-4), row
                moved, compared = max(moved, abs(value - before)), compared + 1
        assert moved > 0.5
        return compared


def sample(subject: nw.Subject) -> Item:
    task = make_task({"kind": "niah", "lengths": (64,), "depths": (0,), "samples": 1})
    return make_samples(subject, task, 0)[0].item


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, witness: Callable[[str], None]) -> Case:
    witness("nnsight")
    return Case(request.param)


@pytest.mark.slow
def test_patched_outputs_of_heads_modules_and_layers(case: Case) -> None:
    last = len(case.clean) - 1
    after = {"span": case.span, "all": range(last + 1), str(last): [last]}
    anatomy = case.subject.anatomy
    sites = ["heads", "attention", "layers"] + ["mixers"] * bool(anatomy.recurrent_layers)

    def expected(row: Any) -> Tensor:
        where = list(after[row.at])
        if row.site == "heads":
            return case.theirs.head(row.layer, *case.ids, where)
        return case.theirs.output(row.site, row.layer, *case.ids, where)

    compared = case.check(case.patched(*sites, at=["span", "all", last]), expected)
    assert compared == 3 * (2 * len(anatomy.attention_layers) + len(anatomy.recurrent_layers) + len(anatomy.layers))


@pytest.mark.slow
def test_patched_memory(case: Case) -> None:
    anatomy = case.subject.anatomy
    read = range(len(case.clean) - 1)  # the last token of the prompt is read after memory is swapped
    sites = ["kv"] + ["recurrent"] * bool(anatomy.recurrent_layers)
    compared = case.check(case.patched(*sites, at="all"), lambda row: case.theirs.memory(row.site, row.layer, *case.ids, read))
    assert compared == len(anatomy.attention_layers) + len(anatomy.recurrent_layers)
    of_span = lambda row: case.theirs.memory("kv", row.layer, *case.ids, list(case.span))  # noqa: E731
    assert case.check(case.patched("kv", at="span"), of_span) == len(anatomy.attention_layers)


def test_hidden_states_and_the_logit_lens_with_a_head_off(case: Case) -> None:
    for layer in case.attention:
        streams, logits = case.theirs.streams(case.ids[0], layer)
        act = nw.AblateHeads(heads=[(layer, HEAD)])
        with nw.observe(case.subject, hidden=True) as seen:
            case.subject.generate([case.clean], act, max_new_tokens=1)
        ours = torch.stack([state.layers for state in seen.hidden], 1)
        torch.testing.assert_close(ours, streams, rtol=0, atol=1e-4)
        lens = nw.logit_lens(case.subject, [case.clean], act, targets=[case.a, case.b], at="all")
        expected = case.theirs.read_out(streams).log_softmax(-1)[..., [case.a, case.b]]  # [layers + 1, tokens, targets]
        torch.testing.assert_close(torch.tensor(lens.log_p).transpose(0, 1), expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(expected[-1], logits.log_softmax(-1)[:, [case.a, case.b]], rtol=0, atol=1e-4)
        assert (logits - case.subject.logits([case.clean])[0]).abs().max() > 1e-2


def test_blocked_edges_of_one_head(case: Case) -> None:
    queries = range(len(case.clean) - 3, len(case.clean))
    spans = {**case.spans, "end": ((queries.start, queries.stop),)}
    plain, moved = case.subject.logits([case.clean])[0], 0.0
    for layer in case.attention:
        expected = case.theirs.blinded(layer, case.ids[0], queries, case.span)
        act = f"block_attention(from='end', to='span', heads=[[{layer}, {HEAD}]])"
        found = case.subject.logits([case.clean], act, spans=spans)[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        moved = max(moved, float((expected - plain).abs().max()))
    assert moved > 1e-2


def test_blocked_sources_of_a_convolution(witness: Callable[[str], None]) -> None:
    """In RecurrentGemma the convolution is a module of its own that stock transformers calls."""
    witness("nnsight")
    case = Case("tiny-griffin")
    plain = case.subject.logits([case.clean])[0]
    for layer in (x.index for x in case.subject.anatomy.recurrent_layers):
        for queries in (range(len(case.clean)), range(case.span.start, case.span.stop)):
            expected = case.theirs.unconvolved(layer, case.ids[0], queries, case.span)
            act = nw.BlockRecurrent(to="span", site="conv", layers=[layer], **{"from": tuple(queries)})  # type: ignore[arg-type]
            found = case.subject.logits([case.clean], act, spans=case.spans)[0]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
            assert (expected - plain).abs().max() > 1e-2
