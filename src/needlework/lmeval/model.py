"""The model type `needlework` for lm-evaluation-harness: run its tasks under an intervention.

A subclass of lm-eval's `hf` model, so that tokenization, truncation, chat templates and few-shot prompts are lm-eval's own;
only the computation is replaced. Importing this module imports lm-eval, which takes seconds.
"""

from __future__ import annotations

import ast
import copy
import inspect
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import LM, TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from needlework.errors import NeedleworkError, short_repr
from needlework.interventions import Intervention, parse
from needlework.lmeval import FOLDER
from needlework.lmeval.documents import Generation, Pair, check_scoring
from needlework.measure import run_requests
from needlework.model.load import DTYPES, blueprint, convert_gguf
from needlework.requests import Answer, Request, stop_tokens
from needlework.subject import Subject, load
from needlework.zoo import resolve

logger = logging.getLogger("needlework")
ROWS = 64  # batch size reported to lm-eval; the engine forms its own batches from the available memory


@register_model("needlework")
class NeedleworkLM(HFLM):
    """lm-eval model with an intervention (given as text). Weights are loaded at the first request."""

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
        self.intervention = parse(intervention) if isinstance(intervention, str) else intervention
        if device and device.startswith("cuda") and not torch.cuda.is_available():  # lm-eval's command line asks for cuda:0
            logger.warning("no CUDA device that torch can use: running on the CPU")
            device = "cpu"
        source = Path(str(resolve(pretrained)))
        folder = convert_gguf(source) if source.is_file() else source
        self._loading: dict[str, Any] = {
            "device": device or ("cuda" if torch.cuda.is_available() else "cpu"),
            "window": window,
            "kernels": kernels,
            "memory_bytes": memory_bytes,
        }
        self._source = source
        self._subject: Subject | None = None
        options = {"trust_remote_code": False, **read_booleans(options)}
        options = {"revision": "main", **options, "device": self._loading["device"], "dtype": dtype}
        super().__init__(str(folder), batch_size=batch_size if isinstance(batch_size, int) else ROWS, **options)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> NeedleworkLM:
        """Parse `--model_args`; unlike lm-eval's parser, commas inside brackets and quotes do not split."""
        return cls.create_from_arg_obj(split_arguments(arg_string), additional_config)  # type: ignore[no-any-return]

    def _create_model(self, pretrained: str, dtype: str = "auto", **options: Any) -> None:
        """Build the model on the meta device and check the intervention, so that errors come before weights are loaded."""
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
            "trust_remote_code": options["trust_remote_code"],
        }
        plan = blueprint(self._source, self._loading["window"], self._loading["trust_remote_code"])
        self.intervention.check(plan.anatomy)
        self._model = plan.model

    @property
    def subject(self) -> Subject:
        """The model with its weights, loaded on first use."""
        if self._subject is None:
            self._subject = load(self._source, **self._loading)
            self._model = self._subject.model
        return self._subject

    def encode_pairs(self, requests: Sequence[Any]) -> list[Pair]:
        """Return (context, continuation) tokens of log-likelihood requests, encoded and truncated by lm-eval's rules."""
        encoder = copy.copy(self)  # returns tokens in place of scores
        encoder._loglikelihood_tokens = lambda requests, **_: [self.truncate(*pair) for _, *pair in requests]  # type: ignore[method-assign]
        return TemplateLM.loglikelihood(encoder, requests, disable_tqdm=True)  # type: ignore[no-any-return]

    def truncate(self, context: Sequence[int], continuation: Sequence[int]) -> Pair:
        """Truncate context + continuation on the left, as lm-eval's `hf` model does; the last token is predicted, no input."""
        whole = tuple([*context, *continuation][-(self.max_length + 1) :])
        return whole[: len(whole) - len(continuation)], whole[len(whole) - len(continuation) :]

    def rolling_pairs(self, text: str) -> list[Pair]:
        """Split a text into (context, continuation) windows for rolling log-likelihood: each token is predicted once."""
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text), prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1
        )
        return [self.truncate(*make_disjoint_window(window)) for window in windows]

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is the greedy continuation."""
        check_scoring(self.intervention)
        pairs = [self.truncate(*pair) for _, *pair in requests]
        options: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}  # one prefill per context for all its continuations
        for context, continuation in pairs:
            options.setdefault(context, {})[continuation] = None
        asked = [Request(context, self.intervention, options=tuple(own)) for context, own in options.items()]
        scores: dict[Pair, tuple[float, bool]] = {}
        for request, answer in zip(asked, run_requests(self.subject, asked), strict=True):
            for option, total, greedy in zip(request.options, answer.totals, answer.greedy, strict=True):
                scores[request.prompt, option] = total, greedy
        for (texts, *_tokens), pair in zip(requests, pairs, strict=True):
            if texts is not None:  # else a window of a rolling request
                self.cache_hook.add_partial("loglikelihood", texts, scores[pair])
        return [scores[pair] for pair in pairs]

    def encode_generation(self, context: str, settings: dict[str, Any]) -> Generation:
        """Encode a generation request: prompt tokens, stop strings and maximum length.

        Raises:
            NeedleworkError: Not greedy decoding, or no space for the prompt.
        """
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        kwargs = normalize_gen_kwargs(settings, self.max_gen_toks)
        until = handle_stop_sequences(kwargs.pop("until", None), eos=eos)
        new_tokens = int(kwargs.pop("max_gen_toks"))
        beams = kwargs.get("num_beams", 1)
        if kwargs.get("do_sample") or float(kwargs.get("temperature") or 0):
            raise NeedleworkError("the model type needlework decodes greedily; set do_sample=False and temperature=0")
        if beams != 1:
            raise NeedleworkError(f"the model type needlework decodes greedily; num_beams={beams} is not")
        room = self.max_length - new_tokens
        if room <= 0:
            raise NeedleworkError(f"{new_tokens} new tokens leave no room for a prompt: the model holds {self.max_length}")
        ids, _ = self.tok_batch_encode([context], left_truncate_len=room, truncation=self.truncation)
        return Generation(tuple(ids[0].tolist()), tuple(until), new_tokens)

    @lru_cache(maxsize=64)  # noqa: B019  (one model lives as long as its process)
    def tokens_with(self, until: tuple[str, ...]) -> frozenset[int]:
        """Return the tokens whose text contains one of these stop strings; decoding stops there, `text` cuts exactly."""
        texts = self.tokenizer.batch_decode([[i] for i in range(len(self.tokenizer))])
        return frozenset(i for i, text in enumerate(texts) if any(stop and stop in text for stop in until))

    def text(self, answer: Answer, until: Sequence[str]) -> str:
        """Decode an answer for lm-eval: cut at the first stop string, without the part up to the end-of-thinking token."""
        ids, end = list(answer.tokens), self.think_end_token
        if isinstance(end, int) and end in ids:
            ids = ids[len(ids) - ids[::-1].index(end) :]
        text = self.tok_decode(ids)
        text = text.lstrip() if isinstance(end, int) else text
        cut: str = postprocess_generated_text(text, list(until), end if isinstance(end, str) else None)
        return cut

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        asked = [self.encode_generation(*request.args) for request in requests]
        eos = getattr(self.subject.model.generation_config, "eos_token_id", None)
        stops = [stop_tokens(eos, self.tokens_with(one.until)) for one in asked]
        wanted = [
            Request(one.prompt, self.intervention, max_new_tokens=one.max_new_tokens, stop=stop)
            for one, stop in zip(asked, stops, strict=True)
        ]
        texts = [self.text(answer, one.until) for answer, one in zip(run_requests(self.subject, wanted), asked, strict=True)]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts


class ReplayLM(LM):
    """An lm-eval model that returns stored answers, so that lm-eval computes its metrics from them."""

    tokenizer_name = ""  # lm-eval uses it as a key of its request cache, which is not used here

    def __init__(self, answers: Mapping[int, Any]) -> None:
        super().__init__()
        self.answers = answers  # id of lm-eval's request -> its answer

    def loglikelihood(self, requests: Sequence[Any]) -> list[Any]:
        return [self.answers[id(request)] for request in requests]

    loglikelihood_rolling = generate_until = loglikelihood


def split_arguments(text: str) -> dict[str, Any]:
    """Parse `pretrained=DIR,intervention=keep_heads(k=5, by='entropy')`; commas in brackets or quotes do not split.

    Values are Python literals or true/false; anything else is text.
    """
    items: list[str] = []
    whole = True  # whether all brackets and quotes of the last item are closed
    for piece in text.strip().removesuffix(",").split(","):
        items = [*items, piece] if whole else [*items[:-1], f"{items[-1]},{piece}"]
        bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", items[-1])
        whole = not set(bare) & set("\"'") and sum((char in "([{") - (char in ")]}") for char in bare) == 0
    arguments = {}
    for item in items if text.strip() else ():
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not name:
            raise NeedleworkError(f"model_args: {item.strip()!r} is not name=value")
        try:
            arguments[name] = value.lower() == "true" if value.lower() in ("true", "false") else ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[name] = value
    return arguments


def read_booleans(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the options that lm-eval's `hf` model declares as bool, because a text such as "no" is truthy."""
    read = dict(options)
    for name, parameter in inspect.signature(HFLM.__init__).parameters.items():
        value = read.get(name)
        if isinstance(value, bool) or value is None or str(parameter.annotation) not in ("bool", "bool | None"):
            continue
        if str(value).lower() not in ("true", "false"):
            raise NeedleworkError(f"model_args: {name}={short_repr(value)} is no truth value; write {name}=true or {name}=false")
        read[name] = str(value).lower() == "true"
    return read


def main(args: Sequence[str]) -> None:
    """Run lm-eval's command line (`needlework lm-eval ARGS...`) with the model type and tasks of this package available."""
    from lm_eval.__main__ import cli_evaluate

    words, run = list(args), "run" in args[:1] or bool(args and args[0].startswith("-"))
    if run and "--include_path" not in words and not {"-h", "--help"} & set(words):
        words += ["--include_path", str(FOLDER)]
    before, sys.argv = sys.argv, ["lm-eval", *words]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
