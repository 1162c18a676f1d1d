"""The model behind the page: draws prompts, answers requests, and shows where heads looked, all as JSON values.

The methods of `Playground` are those of the provider interface in static/provider.js. The server calls them one at a time;
`export.py` calls them with many requests at once.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from needlework.anatomy import Anatomy
from needlework.engine.prefill import KeptPrefills
from needlework.errors import NeedleworkError, short_repr
from needlework.measure import Progress, make_samples, no_progress, require_tokenizer, run_requests, task_ending
from needlework.model.attention import Forward, QueryBlock
from needlework.observation import AttentionObserver
from needlework.play.state import MOST_CHARACTERS, MOST_NEW_TOKENS, PromptState, RequestState, stories
from needlework.requests import Answer, Request, stop_tokens
from needlework.subject import Subject
from needlework.tasks.base import Item, Task, make_task
from needlework.tasks.niah import BASE_LEAD
from needlework.tasks.prompts import Piece, encode, token_ids
from needlework.tasks.retrieval import FRAMES
from needlework.tasks.toy import is_toy
from needlework.toy.words import WORD_ID

SCORES = ["entropy", "l2", "norm", "random"]  # of `keep_heads(by=...)`, without a ranking
RANKINGS = ["copy_score", "needle_mass"]  # methods of `needlework heads` that look once
RANKING_SAMPLES = 12
DRAWS = 20  # seeds of drawn prompts
DEPTHS = [0, 25, 50, 75, 100]
LENGTHS = {"toy": [64, 128, 192, 256], "english": [64, 96, 160, 256]}
NEW_TOKENS = {"toy": 12, "english": 6}
NEEDLE = "The secret code of {key} is {value}."  # of English prompts: short, so that an answer takes few tokens
QUESTION = "What is the secret code of {key}?"
CODES = {"Loran": "471", "Mirel": "285", "Tavon": "936", "Kesta": "610", "Brune": "752", "Oskar": "148", "Palen": "394"}
ENGLISH_LEAD = "ANSWER: The secret code of {key} is"
KEPT_ANSWERS, KEPT_ATTENTION, KEPT_PROMPTS = 512, 64, 16  # answers, their attention, and prompts in tokens
KEPT_BYTES = 256 << 20  # of prompts that were read


@dataclass(frozen=True)
class Encoded:
    """A prompt in tokens."""

    ids: tuple[int, ...]
    spans: dict[str, tuple[tuple[int, int], ...]]
    twins: dict[str, tuple[int, ...]]
    options: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]  # of each token


@dataclass(frozen=True)
class Looks:
    """Attention of all heads during one answer."""

    layers: dict[int, np.ndarray]  # [answer tokens, heads, positions]
    prompt_tokens: int
    needle: np.ndarray  # positions

    def to_dict(self, token: int) -> dict[str, Any]:
        """Return the JSON form of one answer token's attention: see Attention in static/provider.js."""
        count = min((weights.shape[0] for weights in self.layers.values()), default=0)
        if not 0 <= token < count:
            raise NeedleworkError(f"the answer has tokens 0 to {count - 1}, and no token {token}")
        keys = self.prompt_tokens + token
        return {
            "token": token,
            "layers": [
                {"layer": layer, "weights": np.round(weights[token, :, :keys].astype(float), 5).tolist()}
                for layer, weights in self.layers.items()
            ],
            "needle": [
                {"layer": layer, "mass": np.round(weights[:, :, self.needle].sum(-1).mean(0).astype(float), 5).tolist()}
                for layer, weights in self.layers.items()
            ],
        }


class AnswerAttention(AttentionObserver):
    """Keeps the attention of all heads from every token of the answer, while options are decoded beside it.

    Args:
        positions: Most tokens of prompt and answer.
    """

    each_sample = prefill = False

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.most, self.slot = positions, -1
        self.rows: dict[int, list[np.ndarray]] = {}  # layer -> [heads, positions] of each token

    def begin(self, requests: Sequence[Request], device: torch.device) -> None:
        self.slot = next((slot for slot, request in enumerate(requests) if not request.forced), -1)

    def see(self, forward: Forward, layer: int, block: QueryBlock, probabilities: Tensor) -> None:
        for row in (forward.slots == self.slot).nonzero()[:, 0].tolist():
            weights, positions = probabilities[row, :, -1].float().cpu().numpy(), block.k_positions[row].cpu().numpy()
            dense = np.zeros((weights.shape[0], self.most), np.float16)
            dense[:, positions[positions >= 0]] = weights[:, positions >= 0]
            self.rows.setdefault(layer, []).append(dense)

    def looks(self, prompt: Encoded) -> Looks:
        """Return what was kept."""
        needle = [p for start, end in prompt.spans.get("needle", ()) for p in range(start, end)]
        return Looks({layer: np.stack(rows) for layer, rows in sorted(self.rows.items())}, len(prompt.ids), np.array(needle, int))


class Playground:
    """A loaded model, with the methods of the page's provider interface."""

    def __init__(self, subject: Subject, name: str) -> None:
        self.subject, self.name = subject, name
        self.tokenizer = require_tokenizer(subject)
        self.language = "toy" if is_toy(self.tokenizer) else "english"
        self._answers: OrderedDict[object, dict[str, Any]] = OrderedDict()
        self._looks: OrderedDict[object, Looks] = OrderedDict()
        self._rankings: dict[str, list[list[int]]] = {}
        self._prefills = KeptPrefills(KEPT_BYTES)
        self.encode = lru_cache(KEPT_PROMPTS)(self._encode)

    @property
    def anatomy(self) -> Anatomy:
        return self.subject.anatomy

    def describe(self) -> dict[str, Any]:
        anatomy, eos = self.anatomy, getattr(self.subject.model.generation_config, "eos_token_id", None)
        return {
            "name": self.name,
            "architecture": anatomy.architecture,
            "parameters": anatomy.parameters,
            "provider": "server",
            "language": self.language,
            "max_tokens": anatomy.max_tokens,
            "max_characters": MOST_CHARACTERS,
            "max_new_tokens": NEW_TOKENS[self.language],
            "most_new_tokens": MOST_NEW_TOKENS,
            "layers": [_layer(layer) for layer in anatomy.layers],
            "no_mixers": anatomy.no_mixer_reason,
            "scores": SCORES if anatomy.attention_layers else [],
            "rankings": RANKINGS if anatomy.attention_layers else [],
            "draws": {"lengths": self._lengths(), "depths": DEPTHS, "draws": DRAWS, "first": self.first_draw},
            "stop": [str(self.tokenizer.decode([token])) for token in sorted(self._ending[1] - stop_tokens(eos))],
            "task": {"kind": "niah", **self._task_fields},
            "weights": self.subject.body.weights,
        }

    @property
    def first_draw(self) -> dict[str, int]:
        """The draw that the page opens with."""
        lengths = self._lengths()
        return {"length": lengths[min(int(self.language == "toy"), len(lengths) - 1)], "depth": 50, "seed": 0}

    def tour(self, prompt: PromptState) -> list[RequestState]:
        """Return the states of the tour that apply to the model and the prompt."""
        parts = [tuple(story.parts) for story in stories(self.anatomy) if not story.missing]
        most = NEW_TOKENS[self.language]
        states = [RequestState(prompt=prompt, parts=some, max_new_tokens=most) for some in parts]
        return [state for state in states if prompt.twin or all(part["name"] != "swap_memory" for part in state.parts)]

    def stories(self) -> list[dict[str, Any]]:
        return [story.to_dict() for story in stories(self.anatomy)]

    def sample(self, length: int, depth: float, seed: int) -> PromptState:
        """Draw a prompt from the model's own needle task."""
        if length not in self._lengths() or depth not in DEPTHS or not 0 <= seed < DRAWS:
            raise NeedleworkError(
                f"prompts are drawn with a length of {self._lengths()}, a depth of {DEPTHS} and a draw of 0 to {DRAWS - 1}"
            )
        item = make_samples(self.subject, self._task(length, depth), seed)[0].item
        unit = "words" if self.language == "toy" else "tokens"
        return self._prompt_of(item, f"{length} {unit}, needle at {depth} %, draw {seed}")

    def ranking(self, name: str) -> list[list[int]]:
        """Return [layer, head] pairs, best first, by a method of `needlework heads` on samples that the page does not show."""
        from needlework.experiments.heads import rank

        if name not in self.describe()["rankings"]:
            raise NeedleworkError(f"heads are not ranked by {short_repr(name)} here; known: {', '.join(RANKINGS)}")
        if name not in self._rankings:
            found = rank(self.subject, list(RANKINGS), task=self._task(self._lengths()[0]), samples=RANKING_SAMPLES, seed=DRAWS)
            assert isinstance(found, dict)
            self._rankings = {method: [list(head) for head in ranking.order] for method, ranking in found.items()}
        return self._rankings[name]

    def generate(self, request: RequestState) -> dict[str, Any]:
        """Answer one request; answers are kept, so that undo and compare cost nothing."""
        if request.key not in self._answers:
            self._answer_and_look(request)
        self._answers.move_to_end(request.key)
        return self._answers[request.key]

    def generate_all(
        self, requests: Sequence[RequestState], progress: Progress = no_progress, kept: KeptPrefills | None = None
    ) -> list[dict[str, Any]]:
        """Answer requests in one run of the engine, which reads what they share once.

        Args:
            kept: Prompts that were read before.
        """
        start = time.perf_counter()
        encoded = {request.prompt: self.encode(request.prompt) for request in requests}
        asked = [self._requests(encoded[request.prompt], request) for request in requests]
        answers = iter(run_requests(self.subject, list(chain.from_iterable(asked)), progress=progress, kept=kept))
        milliseconds = (time.perf_counter() - start) * 1000 / max(1, len(requests))
        return [
            self._answer(encoded[request.prompt], request, list(islice(answers, len(of_state))), milliseconds)
            for request, of_state in zip(requests, asked, strict=True)
        ]

    def forget(self) -> None:
        """Drop everything that is kept."""
        self._answers.clear()
        self._looks.clear()
        self._prefills = KeptPrefills(KEPT_BYTES)

    def attention(self, request: RequestState, token: int) -> dict[str, Any]:
        """Return where every head looked from one answer token."""
        return self.looks(request).to_dict(token)

    def looks(self, request: RequestState) -> Looks:
        """Return where every head looked during the whole answer."""
        if not self.anatomy.attention_layers:
            raise NeedleworkError(f"{self.name} has no attention to look at")
        if request.key not in self._looks:
            self._answer_and_look(request)
        self._looks.move_to_end(request.key)
        return self._looks[request.key]

    def _answer_and_look(self, request: RequestState) -> None:
        """Answer a request and keep the answer, and where heads looked meanwhile."""
        prompt = self.encode(request.prompt)
        observer = AnswerAttention(len(prompt.ids) + request.max_new_tokens) if self.anatomy.attention_layers else None
        with self.subject.body.observed_by(observer):
            (self._answers[request.key],) = self.generate_all([request], kept=self._prefills)
        if len(self._answers) > KEPT_ANSWERS:
            self._answers.popitem(last=False)
        if observer is not None:
            self._looks[request.key] = observer.looks(prompt)
        if len(self._looks) > KEPT_ATTENTION:
            self._looks.popitem(last=False)

    def _encode(self, prompt: PromptState) -> Encoded:
        """Tokenize a prompt, its twin and its options; `encode` keeps the latest results.

        Raises:
            NeedleworkError: The prompt is empty, or the tokenizer cannot place its needle.
        """
        if not prompt.text.strip():
            raise NeedleworkError("the prompt is empty; type one, or draw one")
        if self.language == "toy":
            self._check_words(prompt)
        encoded = self._pieces(prompt)
        twins = {"twin": self._pieces(prompt.of_twin()).ids} if prompt.twin else {}
        options = tuple(token_ids(self.tokenizer, option) for option in prompt.options)
        if not all(options):
            raise NeedleworkError("an option is empty; leave it out")
        return Encoded(encoded.ids, encoded.spans, twins, options, self.texts(encoded.ids))

    def _pieces(self, prompt: PromptState) -> Any:
        pieces = [Piece(text, ("needle",) if is_needle else ()) for text, is_needle in prompt.pieces()]
        return encode(self.tokenizer, pieces, special=prompt.special)

    def _check_words(self, prompt: PromptState) -> None:
        words = " ".join([prompt.text, prompt.twin, *prompt.options]).split()
        if unknown := sorted({word for word in words if word not in WORD_ID}):
            more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
            raise NeedleworkError(
                f"{self.name} speaks a toy language without the words {', '.join(map(short_repr, unknown[:5]))}{more}; draw a"
                " prompt to see its words"
            )

    def _requests(self, prompt: Encoded, request: RequestState) -> list[Request]:
        """Return the request to generate, and one that decodes each option; all share one prefill."""
        shared: dict[str, Any] = {"spans": prompt.spans, "twins": prompt.twins}
        made = [Request(prompt.ids, request.intervention, request.max_new_tokens, self._ending[1], **shared)]
        return made + [Request(prompt.ids, request.intervention, forced=option, **shared) for option in prompt.options]

    def _answer(self, prompt: Encoded, request: RequestState, answers: Sequence[Answer], milliseconds: float) -> dict[str, Any]:
        said, *options = answers
        totals = [sum(option.logprobs) for option in options]
        shares = np.exp(np.array(totals) - max(totals, default=0.0))
        return {
            "intervention": str(request.intervention),
            "prompt": {"tokens": list(prompt.texts), "needle": [list(part) for part in prompt.spans.get("needle", ())]},
            "tokens": [
                {"text": text, "id": token, "probability": math.exp(logprob)}
                for token, logprob, text in zip(
                    said.tokens, said.logprobs, self.texts((*prompt.ids[-1:], *said.tokens))[1:], strict=True
                )
            ],
            "text": said.text,
            "finish": said.finish,
            "options": [
                {"text": text, "logprob": total, "probability": float(share)}
                for text, total, share in zip(request.prompt.options, totals, shares / max(shares.sum(), 1e-30), strict=True)
            ],
            "receipt": _receipt(said),
            "notes": list(said.receipt.notes),
            "milliseconds": round(milliseconds, 1),
        }

    def texts(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Return the text of each token with the white space before it."""

        def decoded(tokens: Sequence[int]) -> str:
            return str(self.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

        found: list[str] = []
        for before, token in zip((None, *ids), ids, strict=False):
            if before is None:
                found.append(decoded([token]))
                continue
            alone, both = decoded([before]), decoded([before, token])
            found.append(both[len(alone) :] if both.startswith(alone) else decoded([token]))
        return tuple(found)

    def _lengths(self) -> list[int]:
        room = (self.anatomy.max_tokens or MOST_CHARACTERS) - NEW_TOKENS[self.language] - 24  # words of the question
        return [length for length in LENGTHS[self.language] if length <= room] or LENGTHS[self.language][:1]

    @cached_property
    def _task_fields(self) -> dict[str, Any]:
        """The fields of the needle task besides its length and depth."""
        if self.language == "toy":
            return {"distractors": 3}
        (key, value), *others = CODES.items()
        return {
            "style": "base",
            "distractors": 3,
            "reserve_tokens": 0,
            "needle": NEEDLE,
            "question": QUESTION,
            "key": key,
            "value": value,
            "others": [{"key": name, "value": code} for name, code in others],
            "twins": True,
            "max_new_tokens": NEW_TOKENS["english"],
            "stop": ".",
        }

    def _task(self, length: int, depth: float | None = None) -> Task:
        depths = DEPTHS if depth is None else [depth]
        many = {"samples": -(-RANKING_SAMPLES // len(DEPTHS))} if depth is None else {}
        return make_task({"kind": "niah", **self._task_fields, "lengths": [length], "depths": depths, **many})

    @cached_property
    def _ending(self) -> tuple[int, frozenset[int]]:
        return task_ending(self.subject, self._task(self._lengths()[0], 0))

    def _prompt_of(self, item: Item, label: str) -> PromptState:
        """Return a drawn sample as the page's prompt: its text is split around the needle and before the question."""
        ((start, end),) = item.spans["needle"]
        needle = str(self.tokenizer.decode(list(item.prompt[start:end]), clean_up_tokenization_spaces=False)).strip()
        before, _, rest = item.prompt_text.partition(needle)
        mark = FRAMES[self.language][1]
        after, _, question = rest.rpartition(mark)
        facts = item.facts
        options = [text for kind, text in zip(facts["option_kinds"], facts["options"], strict=True) if kind != "absent"]
        target, twin, question = item.target, item.twin_target, mark + question
        if self.language == "english":
            value, other = self._task_fields["value"], _value(twin)
            question = question.removesuffix(BASE_LEAD) + ENGLISH_LEAD.format(key=self._task_fields["key"])
            options, target = [f" {_value(option)}" for option in options], f" {value}"
        else:
            value, other = target, twin
        return PromptState(
            before=before,
            needle=needle,
            after=after,
            question=question,
            twin=needle.replace(value, other) if twin else "",
            options=tuple(options),
            target=target,
            label=label,
        )


def _value(sentence: str) -> str:
    """Return the code of an English needle's sentence: its last word."""
    return sentence.rstrip(".").rpartition(" ")[2]


def _layer(layer: Any) -> dict[str, Any]:
    attention, recurrent = layer.attention, layer.recurrent
    return {
        "index": layer.index,
        "kind": layer.kind,
        "attention": attention and {"heads": attention.query_heads, "kv_heads": attention.kv_heads, "window": attention.window},
        "recurrent": recurrent
        and {
            "mixer": recurrent.mixer,
            "groups": recurrent.groups,
            "group_kind": recurrent.group_kind,
            "no_groups": recurrent.no_groups_reason,
            "conv": bool(recurrent.taps),
            "state": recurrent.carries_state,
        },
    }


def _receipt(answer: Answer) -> dict[str, dict[str, int]]:
    """Return the counts of a receipt by phase, summed over layers."""
    sums: dict[str, dict[str, int]] = {}
    for (_, phase), counts in sorted(answer.receipt.counts.items()):
        for name, number in counts.items():
            if number and name != "positions":
                of_phase = sums.setdefault(phase, {})
                of_phase[name] = of_phase.get(name, 0) + number
    if answer.receipt.swapped:
        sums["between"] = {f"{half}_swapped": 1 for half in answer.receipt.swapped}
    return sums
