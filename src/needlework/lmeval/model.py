"""The model type `needlework` of lm-evaluation-harness: any of its tasks, under any intervention.

A subclass of lm-eval's own `hf` model, so that tokens, truncation, chat template and few-shot are its rules and stay so
when they change there; only the computing is ours. Importing this module imports lm-eval, which takes seconds.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from needlework.errors import NeedleworkError, TrialError
from needlework.interventions import Intervention, parse
from needlework.lmeval.arguments import Generation, Pair, check_phases, fit, greedy_settings, split_arguments
from needlework.model.load import DTYPES, blueprint
from needlework.requests import Answer, Request, stop_tokens

if TYPE_CHECKING:
    from needlework.subject import Subject

logger = logging.getLogger("needlework")
ROWS = 64  # what lm-eval is told as batch size; the engine makes its own batches, from the memory there is


class _Encoder:
    """Stands in for the model where lm-eval turns requests into tokens: it gets the tokens instead of scores."""

    def __init__(self, lm: Any) -> None:
        self._lm = lm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[Pair]:
        return [fit(context, continuation, self._lm.max_length) for _, context, continuation in requests]


@register_model("needlework")
class NeedleworkLM(HFLM):
    """`intervention` is its text form. The weights are read when the first request comes, not before."""

    def __init__(
        self,
        pretrained: str | Path,
        intervention: str | Intervention = "none",
        *,
        device: str | None = None,
        dtype: str = "auto",
        window: str = "transformers",
        kernels: str = "fast",
        memory_bytes: int | None = None,
        batch_size: int | str | None = None,
        **options: Any,
    ) -> None:
        from needlework.zoo import resolve

        self.intervention = parse(intervention) if isinstance(intervention, str) else intervention
        check_phases(self.intervention)
        source = Path(str(resolve(pretrained)))
        folder, gguf = (source.parent, source.name) if source.is_file() else (source, None)
        self._loading: dict[str, Any] = {
            "device": _device(device),
            "window": window,
            "kernels": kernels,
            "memory_bytes": memory_bytes,
        }
        self._source = source
        self._subject: Subject | None = None
        options = {"revision": "main", **options, "device": self._loading["device"], "dtype": dtype, "gguf_file": gguf}
        super().__init__(str(folder), batch_size=batch_size if isinstance(batch_size, int) else ROWS, **options)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> NeedleworkLM:
        """lm-eval splits a string at every comma; ours stand inside brackets and quotes too."""
        return cls.create_from_arg_obj(split_arguments(arg_string), additional_config)  # type: ignore[no-any-return]

    def _create_model(self, pretrained: str, dtype: str = "auto", **options: Any) -> None:
        """Only the plan of the model, without weights: enough to refuse what cannot be done before anything is loaded."""
        known = {"revision", "trust_remote_code", "gpus", "gguf_file", "quantization_config", "subfolder", "offload_folder"}
        unknown = sorted(name for name, value in options.items() if name not in known and value)
        if unknown:
            raise NeedleworkError(f"the model type needlework has no {unknown[0]!r}; lm-eval's own `hf` model may have it")
        if dtype == "auto":
            stored = str(getattr(self._config.get_text_config(decoder=True), "dtype", None)).removeprefix("torch.")
            dtype = stored if stored in DTYPES else "float32"
        self._loading |= {
            "dtype": dtype,
            "revision": None if self._source.exists() else options.get("revision"),
            "trust_remote_code": bool(options.get("trust_remote_code")),
        }
        plan = blueprint(self._source, self._loading["window"])
        self.intervention.check(plan.anatomy)
        self._model = plan.model

    @property
    def subject(self) -> Subject:
        if self._subject is None:
            from needlework.subject import load

            self._subject = load(self._source, **self._loading)
            self._model = self._subject.model
        return self._subject

    def pairs(self, requests: Sequence[Any]) -> list[Pair]:
        """Tokens of log-likelihood requests, encoded and cut as lm-eval does it."""
        return TemplateLM.loglikelihood(_Encoder(self), requests, disable_tqdm=True)  # type: ignore[no-any-return]

    def windows(self, text: str) -> list[Pair]:
        """A whole text as pairs of context and continuation: every token once, with as much context as fits."""
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text), prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1
        )
        pairs = map(make_disjoint_window, windows)
        return [fit(context, continuation, self.max_length) for context, continuation in pairs]

    def score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether the model would have said it."""
        options: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}  # a context is read once for all its continuations
        for context, continuation in pairs:
            options.setdefault(context, {})[continuation] = None
        requests = [Request(context, self.intervention, options=tuple(own)) for context, own in options.items()]
        scores: dict[Pair, tuple[float, bool]] = {}
        for i, answer in self.subject.engine.run(requests):
            if answer.error:
                raise TrialError(answer.error)
            for option, total, greedy in zip(requests[i].options, answer.totals, answer.greedy, strict=True):
                scores[requests[i].prompt, option] = total, greedy
        return [scores[pair] for pair in pairs]

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        answers = self.score([fit(context, continuation, self.max_length) for _, context, continuation in requests])
        for (texts, _context, _continuation), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        texts = [request.args[0] for request in requests]
        windows = [self.windows(text) for text in texts]
        scores = iter(self.score([pair for own in windows for pair in own]))
        totals = [sum(next(scores)[0] for _ in own) for own in windows]
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generation(self, context: str, settings: dict[str, Any]) -> Generation:
        """One prompt to be continued, in tokens, with what ends it. Sampling is refused: answers must be repeatable."""
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        kwargs = normalize_gen_kwargs(settings, self.max_gen_toks)
        until = handle_stop_sequences(kwargs.pop("until", None), eos=eos)
        new_tokens = int(kwargs.pop("max_gen_toks"))
        greedy_settings(kwargs)
        room = self.max_length - new_tokens
        if room <= 0:
            raise NeedleworkError(f"{new_tokens} new tokens leave no room for a prompt: the model holds {self.max_length}")
        ids, _ = self.tok_batch_encode([context], left_truncate_len=room, truncation=self.truncation)
        return Generation(tuple(ids[0].tolist()), tuple(until), new_tokens)

    def request(self, asked: Generation, intervention: Intervention) -> Request:
        eos = getattr(self.subject.model.generation_config, "eos_token_id", None)
        stop = stop_tokens(eos, self.tokens_with(asked.until))
        return Request(asked.prompt, intervention, max_new_tokens=asked.max_new_tokens, stop=stop)

    @lru_cache(maxsize=64)  # noqa: B019  (one model lives as long as its process)
    def tokens_with(self, until: tuple[str, ...]) -> frozenset[int]:
        """Tokens whose text holds one of these stops: they end an answer, and its text is cut at the stop afterwards."""
        texts = self.tokenizer.batch_decode([[i] for i in range(len(self.tokenizer))])
        return frozenset(i for i, text in enumerate(texts) if any(stop and stop in text for stop in until))

    def text(self, answer: Answer, until: Sequence[str]) -> str:
        """An answer as lm-eval wants it: without what comes after a stop, and without thoughts."""
        ids, end = list(answer.tokens), self.think_end_token
        if isinstance(end, int) and end in ids:
            ids = ids[len(ids) - ids[::-1].index(end) :]
        text = self.tok_decode(ids)
        text = text.lstrip() if isinstance(end, int) else text
        cut: str = postprocess_generated_text(text, list(until), end if isinstance(end, str) else None)
        return cut

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        asked = [self.generation(*request.args) for request in requests]
        answers = dict(self.subject.engine.run([self.request(one, self.intervention) for one in asked]))
        texts = []
        for i, (request, one) in enumerate(zip(requests, asked, strict=True)):
            if answers[i].error:
                raise TrialError(answers[i].error)
            texts.append(self.text(answers[i], one.until))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts


def _device(wanted: str | None) -> str:
    """As lm-eval's `hf` model: its command line asks for cuda:0 by itself, and gets the CPU where there is none."""
    if torch.cuda.is_available():
        return wanted or "cuda"
    if wanted and wanted.startswith("cuda"):
        logger.warning("no CUDA device that torch can use: running on the CPU")
        return "cpu"
    return wanted or "cpu"


def main(args: Sequence[str]) -> None:
    """`needlework lm-eval ARGS...`: lm-eval's own command line, with our model type and our tasks known to it."""
    from lm_eval.__main__ import cli_evaluate

    from needlework.lmeval.mini import FOLDER

    words, run = list(args), "run" in args[:1] or bool(args and args[0].startswith("-"))
    if run and "--include_path" not in words and not {"-h", "--help"} & set(words):
        words += ["--include_path", str(FOLDER)]
    before, sys.argv = sys.argv, ["lm-eval", *words]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
