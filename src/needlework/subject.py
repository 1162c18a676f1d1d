"""The public face of a loaded model: ask it to generate, to score choices, for logits, under any intervention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from needlework.anatomy import Anatomy
from needlework.engine.engine import Engine
from needlework.engine.score import logits
from needlework.errors import NeedleworkError, check_plain
from needlework.interventions.acts import Phase, Span
from needlework.interventions.base import NONE, Intervention
from needlework.interventions.text import as_intervention
from needlework.model.body import Body, Kernels
from needlework.requests import Answer, Request, stop_tokens
from needlework.zoo import resolve

if TYPE_CHECKING:
    from needlework.model.load import Window

Prompt = str | Sequence[int]


class Subject:
    """A model with its tokenizer and anatomy. `model` and `tokenizer` stay within reach, unchanged between calls."""

    def __init__(self, body: Body, tokenizer: Any = None, memory_bytes: int | None = None) -> None:
        self.body, self.tokenizer = body, tokenizer
        self.engine = Engine(body, memory_bytes)

    def __repr__(self) -> str:
        anatomy, model = self.anatomy, self.model
        parts = f"{len(anatomy.layers)} layers, {len(anatomy.heads)} attention heads, {anatomy.parameters:,} parameters"
        dtype = str(model.dtype).removeprefix("torch.")
        tokenizer = "no tokenizer" if self.tokenizer is None else type(self.tokenizer).__name__
        return f"<Subject {anatomy.architecture}: {parts}, {dtype} on {self.body.device}, {tokenizer}>"

    @property
    def model(self) -> Any:
        return self.body.model

    @property
    def anatomy(self) -> Anatomy:
        return self.body.anatomy

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
        """Greedy answers, in the order of the prompts. `interventions`, if given, has one for each prompt."""
        each = _interventions(prompts, intervention, interventions)
        eos = getattr(self.model.generation_config, "eos_token_id", None)
        ends = stop_tokens(eos, _several(stop), partial(self.encode, continuation=True))
        requests = [
            Request(
                prompt=self.encode(prompt),
                intervention=act,
                max_new_tokens=max_new_tokens,
                stop=ends,
                spans=span,
                twins={name: self.encode(twin) for name, twin in twin_of.items()},
                boundary=boundary,
            )
            for prompt, act, span, twin_of in zip(
                prompts,
                each,
                _one_each(spans, len(prompts), {}, "spans"),
                _one_each(twins, len(prompts), {}, "twins"),
                strict=True,
            )
        ]
        return self.answer(requests)

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        """Answers to requests, in order, with their text."""
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
        """Logits [rows, tokens, vocabulary]. The first `prompt_tokens` are prefill, the rest is decoded token by token;
        without it all tokens are prefill (scoring). Left padding named by `attention_mask` is taken off first: `prompt_tokens`
        and `spans` count a row's own tokens, without its padding."""
        act = as_intervention(intervention)
        return logits(self.body, input_ids, act, prompt_tokens, attention_mask, spans or {}, boundary)

    def choices(
        self,
        prompts: Sequence[Prompt],
        options: Sequence[Sequence[Prompt]],
        intervention: Intervention | str = NONE,
        *,
        interventions: Sequence[Intervention | str] | None = None,
        spans: Sequence[Mapping[str, Span]] | None = None,
    ) -> list[Answer]:
        """Log-likelihood of each option after each prompt. Scoring: every position counts as prefill."""
        each = _interventions(prompts, intervention, interventions)
        spans = _one_each(spans, len(prompts), {}, "spans")
        lists = _one_each(options, len(prompts), (), "lists of options")
        requests = []
        for prompt, act, span, texts in zip(prompts, each, spans, map(_several, lists), strict=True):
            if not texts:
                raise NeedleworkError("every prompt needs at least one option")
            continuations = tuple(self.encode(text, continuation=True) for text in texts)
            requests.append(Request(self.encode(prompt), act, spans=span, options=continuations))
        return self.answer(requests)

    def encode(self, prompt: Prompt, continuation: bool = False) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            try:
                return tuple(map(index, prompt))
            except TypeError:
                raise NeedleworkError(f"{prompt!r} is neither text nor a list of token ids; one prompt is [prompt]") from None
        check_plain(prompt)
        if self.tokenizer is None:
            raise NeedleworkError("this model was loaded without a tokenizer; give token ids instead of text")
        return tuple(self.tokenizer(prompt, add_special_tokens=not continuation)["input_ids"])

    def use(self, means: Any) -> None:
        """Make calibrated means (`nw.calibrate`, `nw.Means.load`) known to interventions that name their hash."""
        self.body.means[means.hash] = means.tensors

    def with_text(self, answer: Answer) -> Answer:
        """An answer of the engine with what was said."""
        if self.tokenizer is None or answer.option_logprobs:
            return answer
        said = answer.tokens
        # The special token that ended the answer was not said: left in, it would stick to the last word.
        if answer.finish == "stop" and said[-1] in self.tokenizer.all_special_ids:
            said = said[:-1]
        return answer.with_text(self.tokenizer.decode(said))


def _several(given: Any) -> Any:
    """Refuse a lone text where several are due: it would be taken apart into its letters."""
    if isinstance(given, str):
        raise NeedleworkError(f"{given!r} is one text; give a list of prompts, options or stops: [{given!r}]")
    return given


def _interventions(
    prompts: Sequence[Prompt], one: Intervention | str, each: Sequence[Intervention | str] | None
) -> list[Intervention]:
    """What is done to each prompt."""
    for_all = as_intervention(one)
    if each is not None and for_all != NONE:
        raise NeedleworkError(f"both {one} and a list of interventions are given; give one for all prompts, or one for each")
    return [as_intervention(act) for act in _one_each(each, len(_several(prompts)), for_all, "interventions")]


def _one_each(given: Any, count: int, default: Any, name: str) -> Any:
    if given is None:
        return [default] * count
    if isinstance(given, (str, Mapping)):
        raise NeedleworkError(f"{name} must be a list with one entry for each prompt, not {given!r}")
    if len(given) != count:
        raise NeedleworkError(f"{len(given)} {name} for {count} prompts; give one for each")
    return given


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

    `dtype` is torch's or its name; "auto" is what the checkpoint's configuration names.
    `window="deepmind"` is RecurrentGemma's own rule; `kernels="stock"` leaves transformers' own scans in place.
    """
    from needlework.model.load import load_body

    place = resolve(source)
    name = str(dtype).removeprefix("torch.")
    if name == "auto":
        name = own_dtype(place, revision, trust_remote_code)
    body, tokenizer = load_body(place, device, name, device_map, revision, trust_remote_code, window, kernels)
    return Subject(body, tokenizer, memory_bytes)


def own_dtype(source: str | Path, revision: str | None = None, trust_remote_code: bool = False) -> str:
    """The dtype that a checkpoint's configuration names."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
    except Exception:
        return "float32"  # whatever is wrong, loading says it better
    named = config.get_text_config(decoder=True).dtype or config.dtype
    if named is None:
        raise NeedleworkError(f"{source}: dtype='auto', but its configuration names none; choose dtype='float32' or 'bfloat16'")
    return str(named).removeprefix("torch.")


def wrap(model: torch.nn.Module, tokenizer: Any = None, *, kernels: Kernels = "fast") -> Subject:
    """A subject around a model that is already in memory."""
    from needlework.model.load import make_body

    return Subject(make_body(model, "transformers", kernels), tokenizer)
