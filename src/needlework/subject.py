"""Subject: a loaded model with methods to generate, score choices and return logits; and calibrated means of its heads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from needlework.anatomy import Anatomy
from needlework.engine.engine import Engine, feed_tokens
from needlework.errors import NeedleworkError, check_plain
from needlework.interventions.acts import ChangeOutputs, Phase, Place, Span
from needlework.interventions.base import NONE, Intervention, as_intervention
from needlework.model.hooked_model import HookedModel, Kernels
from needlework.receipts import Tally
from needlework.requests import Answer, Request, check_tokens, prepare, stop_tokens
from needlework.tables import Table
from needlework.zoo import resolve

if TYPE_CHECKING:
    from needlework.model.load import Window

Prompt = str | Sequence[int]


class Subject:
    """A model with its tokenizer and anatomy, made by `nw.load` or `nw.wrap`.

    Attributes:
        model: The model of transformers, unmodified between calls.
        tokenizer: Its tokenizer; None without one.
        anatomy: Layers, heads, windows and sizes.
        body: The model with needlework's hooks.
        engine: Runs requests in batches.
    """

    def __init__(self, body: HookedModel, tokenizer: Any = None, memory_bytes: int | None = None) -> None:
        self.body, self.tokenizer = body, tokenizer
        self.model: Any = body.model
        self.anatomy: Anatomy = body.anatomy
        self.engine = Engine(body, memory_bytes)

    def __repr__(self) -> str:
        anatomy, dtype = self.anatomy, str(self.model.dtype).removeprefix("torch.")
        parts = f"{len(anatomy.layers)} layers, {len(anatomy.heads)} attention heads, {anatomy.parameters:,} parameters"
        tokenizer = "no tokenizer" if self.tokenizer is None else type(self.tokenizer).__name__
        return f"<Subject {anatomy.architecture}: {parts}, {dtype} on {self.body.device}, {tokenizer}>"

    def _repr_html_(self) -> str:
        return Table.from_frame(self.anatomy.frame(), repr(self)[1:-1]).to_html()

    def generate(
        self,
        prompts: Sequence[Prompt],
        intervention: Intervention | str = NONE,
        *,
        interventions: Sequence[Intervention | str] | None = None,
        max_new_tokens: int = 40,
        stop: Sequence[int | str] = (),
        spans: Sequence[Mapping[str, Span]] | None = None,
        twins: Sequence[Mapping[str, Prompt]] | None = None,
        boundary: Phase = "decode",
    ) -> list[Answer]:
        """Generate greedily and return the answers in the order of the prompts.

        Args:
            prompts: Texts or token ids.
            intervention: One intervention for all prompts.
            interventions: One intervention for each prompt instead.
            stop: Token ids, or texts of one token, that end an answer besides the model's end tokens.
            spans: Named token ranges of each prompt, for interventions that refer to them.
            twins: Named prompts of the same length, for `swap_memory`.
            boundary: The phase that processes the last prompt token.
        """
        eos = getattr(self.model.generation_config, "eos_token_id", None)
        ends = stop_tokens(eos, _several(stop), partial(self.encode, continuation=True))
        requests = []
        for prompt, act, (span, twin_of) in _each(
            prompts, intervention, interventions, ("spans", spans, {}), ("twins", twins, {})
        ):
            others = {name: self.encode(twin) for name, twin in twin_of.items()}
            requests.append(Request(self.encode(prompt), act, max_new_tokens, ends, span, others, boundary))
        return self.answer(requests)

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        """Run requests and return their answers in order, with their text."""
        answers: dict[int, Answer] = dict(self.engine.run(requests))
        return [self.with_text(answers[i]) for i in range(len(requests))]

    def logits(
        self,
        input_ids: Tensor | Sequence[Sequence[int]],
        intervention: Intervention | str = NONE,
        *,
        prompt_tokens: int | None = None,
        attention_mask: Tensor | None = None,
        spans: Mapping[str, Span] | None = None,
        boundary: Phase = "decode",
    ) -> Tensor:
        """Return logits [rows, tokens, vocabulary].

        Args:
            input_ids: [rows, tokens]
            prompt_tokens: Number of prompt tokens; the rest is decoded token by token. By default all tokens are prefill.
            attention_mask: [rows, tokens], 0 for left padding. Rows run without their padding, whose logits are 0;
                `prompt_tokens` and `spans` do not count it.
            boundary: The phase that processes the last prompt token.
        """
        body, act = self.body, as_intervention(intervention)
        ids = torch.as_tensor(input_ids, device=body.device)
        if ids.dim() != 2 or ids.shape[1] == 0 or ids.is_floating_point():
            shape = f"{tuple(ids.shape)} of {ids.dtype}"
            raise NeedleworkError(f"input_ids must be [rows, tokens] of whole numbers with at least one token, got {shape}")
        if attention_mask is not None:
            # Each row runs alone, without its left padding, so that padding cannot change its logits.
            mask = attention_mask.to(ids.device).bool()
            if mask.shape != ids.shape or not bool((mask.int().diff(dim=1) >= 0).all()) or not bool(mask[:, -1].all()):
                raise NeedleworkError(
                    "attention_mask must have the shape of input_ids and mark left padding only (0 ... 0 1 ... 1)"
                )
            shortest = int(mask.sum(1).min())
            if prompt_tokens is not None and prompt_tokens > shortest:
                raise NeedleworkError(
                    f"prompt_tokens={prompt_tokens} counts without padding, the shortest row has {shortest} tokens"
                )
            out = torch.zeros(*ids.shape, body.anatomy.vocabulary, device=ids.device)
            for r, pads in enumerate((~mask).sum(1).tolist()):
                row = ids[r : r + 1, pads:]
                out[r, pads:] = self.logits(row, act, prompt_tokens=prompt_tokens, spans=spans, boundary=boundary)[0]
            return out
        count = ids.shape[1] if prompt_tokens is None else prompt_tokens
        if not 1 <= count <= ids.shape[1]:
            raise NeedleworkError(f"prompt_tokens={count} must lie between 1 and the {ids.shape[1]} tokens given")
        if prompt_tokens is None:
            boundary = "prefill"  # nothing is decoded
        body.check_length(ids.shape[1])
        steps = ids.shape[1] - count + 1
        asked = [Request(tuple(row[:count]), act, steps, spans=spans or {}, boundary=boundary) for row in ids.tolist()]
        items = [prepare(request, body.anatomy) for request in asked]
        body.check_rankings(act)
        if items[0].twins:
            raise NeedleworkError("logits() does not swap memory; use generate(..., twins=[...])")
        with body.session():
            if body.observer is not None:
                body.observer.begin(asked, body.device)
            return feed_tokens(body, items, ids, "all")

    def choices(
        self,
        prompts: Sequence[Prompt],
        options: Sequence[Sequence[Prompt]],
        intervention: Intervention | str = NONE,
        *,
        interventions: Sequence[Intervention | str] | None = None,
        spans: Sequence[Mapping[str, Span]] | None = None,
    ) -> list[Answer]:
        """Return answers with the log-likelihoods of each prompt's options; every position counts as prefill."""
        requests = []
        for prompt, act, (span, texts) in _each(
            prompts, intervention, interventions, ("spans", spans, {}), ("lists of options", options, ())
        ):
            if not _several(texts):
                raise NeedleworkError("every prompt needs at least one option")
            continuations = tuple(self.encode(text, continuation=True) for text in texts)
            requests.append(Request(self.encode(prompt), act, spans=span, options=continuations))
        return self.answer(requests)

    def encode(self, prompt: Prompt, continuation: bool = False) -> tuple[int, ...]:
        """Return token ids of a text, with special tokens unless it is a continuation; token ids are returned as they are."""
        if not isinstance(prompt, str):
            try:
                return tuple(map(index, prompt))
            except TypeError:
                raise NeedleworkError(f"{prompt!r} is neither text nor a list of token ids; one prompt is [prompt]") from None
        check_plain(prompt)
        if self.tokenizer is None:
            raise NeedleworkError("this model was loaded without a tokenizer; give token ids instead of text")
        return tuple(self.tokenizer(prompt, add_special_tokens=not continuation)["input_ids"])

    def use(self, means: Means) -> None:
        """Register calibrated means (`nw.calibrate`, `nw.Means.load`) for interventions that refer to their hash."""
        self.body.means[means.hash] = means.tensors

    def with_text(self, answer: Answer) -> Answer:
        """Return the answer with its tokens decoded to text."""
        if self.tokenizer is None or answer.option_logprobs:
            return answer
        said = answer.tokens
        # Drop the special token that ended the answer: decoded, it would be attached to the last word.
        if answer.finish == "stop" and said[-1] in self.tokenizer.all_special_ids:
            said = said[:-1]
        return replace(answer, text=self.tokenizer.decode(said))


def _several(given: Any) -> Any:
    """Raise for a single text where a list is expected, since it would be split into characters."""
    if isinstance(given, str):
        raise NeedleworkError(f"{given!r} is one text; give a list of prompts, options or stops: [{given!r}]")
    return given


def _each(
    prompts: Sequence[Prompt], one: Intervention | str, each: Sequence[Intervention | str] | None, *lists: tuple[str, Any, Any]
) -> Iterator[tuple[Prompt, Intervention, tuple[Any, ...]]]:
    """Return each prompt with its intervention and its entry of every list, given as (name, list or None, default)."""
    for_all = as_intervention(one)
    if each is not None and for_all != NONE:
        raise NeedleworkError(f"both {one} and a list of interventions are given; give one for all prompts, or one for each")
    columns, count = [], len(_several(prompts))
    for name, given, default in (("interventions", each, for_all), *lists):
        if isinstance(given, (str, Mapping)):
            raise NeedleworkError(f"{name} must be a list with one entry for each prompt, not {given!r}")
        if given is not None and len(given) != count:
            raise NeedleworkError(f"{len(given)} {name} for {count} prompts; give one for each")
        columns.append([default] * count if given is None else given)
    acts, *others = columns
    return zip(prompts, map(as_intervention, acts), zip(*others, strict=True), strict=True)


def load(
    source: str | Path,
    *,
    device: str = "cpu",
    dtype: str | torch.dtype = "float32",
    device_map: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    window: Window = "transformers",
    kernels: Kernels = "fast",
    memory_bytes: int | None = None,
) -> Subject:
    """Load a model by its name in the zoo, from a directory, a .gguf file or a hub id.

    Args:
        dtype: A torch dtype or its name; "auto" uses the dtype in the checkpoint's configuration.
        window: Rule of sliding windows; "deepmind" is RecurrentGemma's original rule, with one key more.
        kernels: "stock" keeps the scan implementations of transformers.
        memory_bytes: Limit for prompts and answers; by default half of the free memory.
    """
    from needlework.model.load import load_hooked_model, own_dtype

    place, name = resolve(source), str(dtype).removeprefix("torch.")
    name = own_dtype(place, revision, trust_remote_code) if name == "auto" else name
    body, tokenizer = load_hooked_model(place, device, name, device_map, revision, trust_remote_code, window, kernels)
    return Subject(body, tokenizer, memory_bytes)


def wrap(model: torch.nn.Module, tokenizer: Any = None, *, kernels: Kernels = "fast") -> Subject:
    """Return a Subject for a model that is already in memory."""
    from needlework.model.load import hook_model

    return Subject(hook_model(model, "transformers", kernels), tokenizer)


# --- Calibrated means of head outputs ---

_DECODED = 32  # last tokens of each text, decoded one by one to measure the means of the decode phase


@dataclass(frozen=True)
class Means:
    """Mean head outputs, measured by `nw.calibrate`.

    Attributes:
        tensors: [heads, dim] by (layer, phase).
    """

    tensors: dict[tuple[int, str], Tensor]

    @property
    def hash(self) -> str:
        """The hash that refers to these means in the text of interventions."""
        digest = hashlib.sha256()
        for (layer, phase), tensor in sorted(self.tensors.items()):
            digest.update(f"{layer} {phase} {tuple(tensor.shape)}".encode())
            digest.update(tensor.float().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def save(self, path: Path | str) -> None:
        from safetensors.torch import save_file

        save_file({f"{layer}.{phase}": t.contiguous() for (layer, phase), t in self.tensors.items()}, str(path))

    @classmethod
    def load(cls, path: Path | str) -> Means:
        from safetensors.torch import load_file

        try:
            stored = {tuple(key.split(".")): tensor for key, tensor in load_file(str(path)).items()}
            return cls({(int(layer), phase): tensor for (layer, phase), tensor in stored.items()})
        except Exception as error:
            raise NeedleworkError(
                f"{path}: no calibrated means can be read ({error}); nw.calibrate(...).save makes them"
            ) from None


def calibrate(subject: Subject, texts: Sequence[Prompt]) -> Means:
    """Measure the mean head outputs on texts and register them with the subject.

    The last tokens of each text are decoded and the others prefilled, since each phase has its own means.
    """
    if isinstance(texts, str):
        raise NeedleworkError("give a list of texts, calibrate(subject, [text]): a lone one would be read letter by letter")
    body = subject.body
    tokens = [subject.encode(text) for text in texts]
    for row in tokens:
        check_tokens(row, body.anatomy, "a text")
        body.check_length(len(row))
    sums: dict[tuple[int, str], Tensor] = {}
    counts: dict[tuple[int, str], int] = {}

    def record(outputs: Tensor, place: Place) -> Tensor:  # [queries, heads, dim]
        key = (place.layer, place.phase)
        sums[key] = sums.get(key, torch.zeros(())) + outputs.double().sum(0)
        counts[key] = counts.get(key, 0) + outputs.shape[0]
        return outputs

    acts = [ChangeOutputs(layer.index, record) for layer in body.anatomy.attention_layers]
    with body.session():
        for row in tokens:
            ids = torch.tensor([row], device=body.device)
            split = max(1, ids.shape[1] - _DECODED)
            memory, singles = body.new_memory(1), [ids[:, t : t + 1] for t in range(split, ids.shape[1])]
            fed: dict[Phase, list[Tensor]] = {"prefill": [ids[:, :split]], "decode": singles}
            for phase, parts in fed.items():
                rows = body.compile([acts], [0], phase)
                for part in parts:
                    body.feed(part, memory, phase, rows, Tally(1))
    if not sums:
        raise NeedleworkError("calibrate needs at least one text, and a model with attention layers")
    means = Means({key: (total / counts[key]).float().cpu() for key, total in sums.items()})
    subject.use(means)
    return means
