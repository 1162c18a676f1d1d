"""A loaded model that is fed tokens while acts apply: sessions, memory, compiled edits, forwards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from needlework.anatomy import Anatomy
from needlework.errors import NeedleworkError
from needlework.interventions.acts import Act, ClearState, LimitKeys, Phase
from needlework.interventions.attention import rankings
from needlework.interventions.base import Intervention
from needlework.interventions.ranking import AND_CONFIG, OF_TENSORS
from needlework.model.attention import NAME, Forward, Observer, current
from needlework.model.chunks import CHUNK_TOKENS, cuts
from needlework.model.edits import LayerEdits, compile_layer
from needlework.model.families import Family
from needlework.model.files import config_hash, weights_hash
from needlework.model.memory import Memory
from needlework.model.mixers import Mixer, MixerEdits, compile_mixer, holder, hooked
from needlework.model.patches import fast_kernels
from needlework.model.probe import Findings, attention_switched, run_model
from needlework.model.room import room_for
from needlework.model.session import slow_kernel_hints, turn
from needlework.model.streaming import ENTRY
from needlework.receipts import Tally

Kernels = Literal["fast", "stock"]
_CHECKED_TOKENS = 12


@dataclass
class Rows:
    """The acts of a batch in one phase, compiled: edits per layer with one entry a row."""

    slots: Tensor  # [rows] which trial each row belongs to
    attention: dict[int, LayerEdits] = field(default_factory=dict)
    mixers: dict[int, MixerEdits] = field(default_factory=dict)
    clears: dict[int, dict[int, list[int]]] = field(default_factory=dict)  # position -> layer -> rows

    @property
    def one_piece(self) -> bool:
        """Some row's acts look at all queries of a prompt at once."""
        return any(edits.needs_all_queries for edits in self.attention.values())

    def select(self, rows: Tensor) -> Rows:
        places = {int(row): i for i, row in enumerate(rows)}
        return Rows(
            self.slots[rows],
            {layer: edits.select(rows) for layer, edits in self.attention.items()},
            {layer: edits.select(rows) for layer, edits in self.mixers.items()},
            {
                position: {layer: [places[r] for r in cleared if r in places] for layer, cleared in layers.items()}
                for position, layers in self.clears.items()
            },
        )


class Body:
    """Model, anatomy and everything needed to act on it. Knows rows and token ids, not trials."""

    def __init__(self, model: Any, family: Family, findings: Findings, kernels: Kernels) -> None:
        self.model, self.family, self.kernels = model, family, kernels
        self.anatomy: Anatomy = findings.anatomy
        self.attention: dict[nn.Module, int] = findings.attention
        self.mixers: tuple[Mixer, ...] = findings.mixers
        self.shareable = findings.shareable
        self.streams = findings.streams
        self.means: dict[str, Mapping[tuple[int, str], Tensor]] = {}
        self.observer: Observer | None = None
        self.last_only: int | None = None  # a layer of whose queries only the last one will be read
        self.heard: dict[int, list[Any]] | None = None  # where the scores of heads are noted, if anyone asks for them
        self.device = next(model.parameters()).device
        self.source: Path | None = None  # the directory or file that it was loaded from
        self._windows = {layer: part.window for layer, part in self.anatomy.attention_parts()}
        self._open = False
        self._trusted = False  # our own attention maths was seen to agree with the model's
        self.chunk = CHUNK_TOKENS  # the most tokens of a prompt that are read in one forward, where a prefill can go on

    @cached_property
    def weights(self) -> str:
        """Which weights these are: a hash of the files that they came from, as stores have it, else of the tensors."""
        return weights_hash(self.source) if self.source else _tensors_hash(self.model)

    def check_rankings(self, intervention: Intervention) -> None:
        """Refuse an order of heads that was measured on another model."""
        for ranking in rankings(intervention):
            if ranking.model.weights:
                ranking.check(self.anatomy, self.weights)

    @property
    def continues(self) -> bool:
        """Whether a prefill can go on with several tokens at once; else the rest is fed token by token."""
        return self.family.continues_prefill(self.kernels == "fast")

    @contextmanager
    def session(self, gradients: bool = False) -> Iterator[None]:
        """Put our attention function and kernels in place; leave no trace on the model, also after an exception.

        One session at a time: other threads wait, and one inside another is refused. With `gradients`, what is computed can be
        differentiated (see `model/gates.py`).
        """
        with turn(), ExitStack() as stack:
            self._open = True
            stack.callback(self._leave)
            if self.attention:
                stack.enter_context(attention_switched(self.model, NAME))
            if self.kernels == "fast":
                stack.enter_context(fast_kernels(self.model))
            if self.device.type != "cuda":
                stack.enter_context(slow_kernel_hints())
            stack.enter_context(torch.enable_grad() if gradients else torch.inference_mode())
            training = [module for module in self.model.modules() if module.training]
            self.model.eval()
            stack.callback(_train, training)
            yield

    @contextmanager
    def chunks_of(self, tokens: int) -> Iterator[None]:
        """While open, chunks have at most so many tokens; 0 leaves them as they are."""
        usual, self.chunk = self.chunk, min(self.chunk, tokens or self.chunk)
        try:
            yield
        finally:
            self.chunk = usual

    def _hooked(self, rows: Rows, memory: Memory) -> AbstractContextManager[None]:
        """Hooks on the modules that this batch acts on and on no other: torch is slower through hooked modules."""
        dropped = {layer for layer, edits in rows.attention.items() if edits.dropped is not None}
        if not dropped and not rows.mixers:
            return nullcontext()
        mixers = [mixer for mixer in self.mixers if mixer.layer in rows.mixers]
        blocks = {module: layer for module, layer in self.attention.items() if layer in dropped}
        return hooked(mixers, blocks, memory, self._empty)

    def _leave(self) -> None:
        self._open = False

    def _empty(self, mixer: Mixer, rows: int) -> Memory:
        """A memory that has seen nothing, for one mixer by itself."""
        return Memory(self.family.make_cache(self.model.config), _on_modules([mixer]), rows)

    def new_memory(self, rows: int) -> Memory:
        cache = self.family.make_cache(self.model.config)
        return Memory(self.streams.install(cache) if self.streams else cache, _on_modules(self.mixers), rows)

    def compile(self, rows: Sequence[Sequence[Act]], samples: Sequence[int], phase: Phase, slots: Tensor) -> Rows:
        """Edits of a batch from each row's acts."""
        compiled = Rows(slots)
        touched = {act.layer for row in rows for act in row}
        by_layer = {layer: [[act for act in row if act.layer == layer] for row in rows] for layer in touched}
        for layer, part in self.anatomy.attention_parts():
            if layer in touched:
                means = {name: table[layer, phase] for name, table in self.means.items() if (layer, phase) in table}
                edits = compile_layer(by_layer[layer], samples, part.query_heads, means, self.device)
                if not edits.idle:
                    compiled.attention[layer] = edits
        for mixer in self.mixers:
            if mixer.layer in touched:
                mixer_edits = compile_mixer(by_layer[mixer.layer], mixer.groups, self.device)
                if not mixer_edits.idle:
                    compiled.mixers[mixer.layer] = mixer_edits
        for i, row in enumerate(rows):
            for act in row:
                if isinstance(act, ClearState):
                    compiled.clears.setdefault(act.position, {}).setdefault(act.layer, []).append(i)
        return compiled

    def feed(
        self,
        ids: Tensor,
        memory: Memory,
        phase: Phase,
        rows: Rows,
        tally: Tally,
        positions: Tensor | None = None,
        keep: Literal["last", "all"] | Tensor = "last",
    ) -> Tensor:
        """Feed tokens [rows, n]; logits [rows, 1 or n, vocabulary] in fp32. The memory moves on.

        `keep` says after which tokens logits are wanted: the last, all, or in each row the one at this place [rows].
        """
        n = ids.shape[1]
        start = memory.length
        if positions is None:
            positions = torch.arange(start, start + n, device=self.device).expand(ids.shape[0], -1)
        logits: list[Tensor] = []
        with room_for(memory.cache, start + n) if n > self.chunk else nullcontext():
            for part in self._parts(start, n, rows, phase):
                self._apply_clears(memory, rows, tally, phase, positions[:, part.start])
                last = part.stop == n
                here = (keep - part.start).clamp(0, part.stop - part.start - 1) if isinstance(keep, Tensor) else keep
                out = self._forward(ids[:, part], positions[:, part], memory, phase, rows, tally, here)
                if isinstance(keep, Tensor):
                    found = (keep >= part.start)[:, None, None]
                    logits = [torch.where(found, out, logits[0]) if logits else out]
                elif keep == "all" or last:
                    logits.append(out)
        return torch.cat(logits, 1) if len(logits) > 1 else logits[0]

    def _parts(self, start: int, n: int, rows: Rows, phase: Phase) -> list[slice]:
        """Cut where a state must be cleared first, and into single tokens where the model cannot continue a prefill.

        Where it can, long prompts are cut into chunks.
        """
        if start and n > 1 and not self.continues:
            return [slice(i, i + 1) for i in range(n)]
        long = phase == "prefill" and self.continues and not rows.one_piece
        ends = sorted({0, n, *(p - start for p in rows.clears if 0 < p - start < n), *(cuts(n, self.chunk) if long else ())})
        parts = [slice(a, b) for a, b in pairwise(ends)]
        if len(parts) > 1 and not self.continues:
            return [parts[0], *(slice(i, i + 1) for i in range(parts[0].stop, n))]
        return parts

    def _apply_clears(self, memory: Memory, rows: Rows, tally: Tally, phase: Phase, at: Tensor) -> None:
        if not rows.clears:
            return
        for i, position in enumerate(at.tolist()):
            for layer, cleared in rows.clears.get(position, {}).items():
                if i in cleared:
                    mask = torch.zeros(memory.rows, dtype=torch.bool, device=self.device)
                    mask[i] = True
                    cache_layers = [mixer.cache_layer for mixer in self.mixers if mixer.layer == layer]
                    memory.clear(cache_layers, mask)
                    tally.add(layer, phase, "states_cleared", rows.slots[i : i + 1], 1)

    def _forward(
        self,
        ids: Tensor,
        positions: Tensor,
        memory: Memory,
        phase: Phase,
        rows: Rows,
        tally: Tally,
        keep: Literal["last", "all"] | Tensor,
    ) -> Tensor:
        if not self._open:
            raise RuntimeError("feed a body inside `with body.session():`")
        shared = memory.shared
        forward = Forward(
            phase,
            positions,
            rows.slots,
            tally,
            self.attention,
            rows.attention,
            rows.mixers,
            self.observer,
            shared,
            self._windows,
            self.kernels == "fast",
            self.family.dense_masks,
            self.last_only,
            self.heard,
        )
        if forward.own_maths:
            self.check_own_maths()
        with memory.mounted(), current(forward), self._hooked(rows, memory):
            wanted = keep[:, None] if isinstance(keep, Tensor) else int(keep == "last")
            out = run_model(self.model, ids, positions, memory, logits_to_keep=wanted)
        memory.length += ids.shape[1]
        logits: Tensor = out.logits
        if isinstance(keep, Tensor):
            if logits.shape[1] > 1:  # a model that always gives all
                logits = logits[torch.arange(len(keep), device=keep.device), keep][:, None]
        elif keep == "last":
            logits = logits[:, -1:]
        return logits.float()

    def check_own_maths(self) -> None:
        """Once per model, before our maths first replaces stock attention: on a short prompt both must give one answer."""
        if self._trusted:
            return
        self._trusted = True  # asked again while it checks
        observer, self.observer = self.observer, None
        try:
            slots = torch.zeros(1, dtype=torch.int64, device=self.device)
            ids = (torch.arange(_CHECKED_TOKENS, device=self.device) * 7 % self.anatomy.vocabulary)[None]
            parts = list(self.anatomy.attention_parts())
            no_limit: list[Act] = [LimitKeys(layer, 1 << 30, 0) for layer, _ in parts]
            of_heads: list[Act] = [LimitKeys(layer, 1 << 30, 0, frozenset(range(part.query_heads))) for layer, part in parts]
            answers = []
            for acts in ([], no_limit, of_heads):  # stock; by the compiled kernel, where it serves; and by tensor maths
                rows = self.compile([acts], [0], "prefill", slots)
                answers.append(self.feed(ids, self.new_memory(1), "prefill", rows, Tally(1), keep="all"))
        finally:
            self.observer = observer
        if not all(self.agree(answers[0], other) for other in answers[1:]):
            self._trusted = False
            apart = float((answers[0] - torch.stack(answers[1:])).abs().max() / answers[0].abs().max().clamp_min(1e-6))
            raise NeedleworkError(
                f"needlework's attention differs from {self.anatomy.architecture}'s own by {apart:.1e} of its largest logit on a"
                " short prompt: this model's attention does something that needlework does not know. Nothing was run"
            )

    def agree(self, logits: Tensor, others: Tensor) -> bool:
        """Whether two ways to the same logits [rows, tokens, vocabulary] lie no further apart than rounding puts them."""
        each = (logits - others).abs().amax(-1) / logits.abs().max().clamp_min(1e-6)  # by token
        if self.model.dtype == torch.float32:
            return bool(each.max() <= 1e-3)
        return bool(each.median() <= 0.1)  # in half precision, a token may go to another expert

    def check_length(self, tokens: int) -> None:
        most = self.anatomy.max_tokens
        if most is not None and tokens > most:
            raise NeedleworkError(
                f"{tokens} tokens are more than the {most} that {self.anatomy.architecture} allows;"
                " shorten the prompt or the answer"
            )


def _on_modules(mixers: Sequence[Mixer]) -> dict[str, tuple[int, nn.Module, str]]:
    """Where mixers keep states that are not in the cache."""
    return {
        f"{mixer.layer}.{name}": (mixer.cache_layer, *holder(mixer.module, name))
        for mixer in mixers
        for name in mixer.state_names
    }


def _train(modules: Sequence[nn.Module]) -> None:
    """These modules, and no others, are in training mode again."""
    for module in modules:
        module.training = True


def _tensors_hash(model: Any) -> str:
    """Which weights these are, which of their heads stream, and what is computed with them, of a model from no file."""
    total = hashlib.sha256(repr(getattr(model.config, ENTRY, None)).encode())
    for name, tensor in sorted(model.state_dict().items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return f"{OF_TENSORS}{total.hexdigest()[:32]}{AND_CONFIG}{config_hash(model.config.to_dict())}"
