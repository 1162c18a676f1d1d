"""A loaded model that runs forwards with interventions: sessions, caches, compiled edits, differentiable gates on heads."""

from __future__ import annotations

import gc
import hashlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from needlework.anatomy import Anatomy
from needlework.errors import NeedleworkError
from needlework.interventions.acts import Act, ClearState, Half, LimitKeys, Phase
from needlework.interventions.base import Intervention
from needlework.interventions.builtin import rankings
from needlework.interventions.ranking import AND_CONFIG, OF_TENSORS
from needlework.model.attention import NAME, Forward, Observer, current, get_current
from needlework.model.edits import LayerEdits, compile_layer, select_rows
from needlework.model.families import Family, fast_kernels
from needlework.model.files import config_hash, weights_hash
from needlework.model.memory import Memory, Mixer, preallocated_cache, states_on_modules
from needlework.model.mixers import MixerEdits, compile_mixer, hooked
from needlework.model.outputs import Edits, OutputEdits, Replacement, ShownOutputs, Where, compile_outputs, outputs_hooked
from needlework.model.probe import Findings, attention_switched, run_model
from needlework.model.pruned import ENTRY
from needlework.receipts import Tally

Kernels = Literal["fast", "stock"]
CHUNK_TOKENS = 4096  # maximum of a chunk; also the most tokens in a batch of short prompts on a CPU
LEAST_CHUNK = 512  # minimum of a chunk when memory is scarce; below it, overhead per forward is noticeable
_CHECKED_TOKENS = 12


@dataclass
class Rows:
    """The acts of a batch in one phase, compiled into edits per layer with one entry per row."""

    slots: Tensor  # [rows] index of the trial that each row belongs to
    attention: dict[int, LayerEdits] = field(default_factory=dict)
    mixers: dict[int, MixerEdits] = field(default_factory=dict)
    outputs: dict[Where, OutputEdits] = field(default_factory=dict)  # recordings and patches of modules' outputs
    clears: dict[int, dict[int, list[int]]] = field(default_factory=dict)  # position -> layer -> rows

    def select(self, rows: Tensor) -> Rows:
        """Return the edits of the given rows, in this order."""
        places = {int(row): i for i, row in enumerate(rows)}
        attention = {layer: select_rows(edits, rows) for layer, edits in self.attention.items()}
        mixers = {layer: edits.select(rows) for layer, edits in self.mixers.items()}
        outputs = {where: found for where, edits in self.outputs.items() if (found := edits.select(rows)) is not None}
        clears = {
            position: {layer: [places[r] for r in cleared if r in places] for layer, cleared in layers.items()}
            for position, layers in self.clears.items()
        }
        return Rows(self.slots[rows], attention, mixers, outputs, clears)


class HookedModel:
    """A transformers model with its anatomy and the hooks to intervene on it. It handles rows and token ids, not trials."""

    def __init__(self, model: Any, family: Family, findings: Findings, kernels: Kernels) -> None:
        self.model, self.family, self.kernels = model, family, kernels
        self.anatomy: Anatomy = findings.anatomy
        self.attention: dict[nn.Module, int] = findings.attention
        self.mixers: tuple[Mixer, ...] = findings.mixers
        self.shareable = findings.shareable
        self.streams = findings.streams
        self._kv_layers = findings.kv_layers
        self.means: dict[str, Mapping[tuple[int, str], Tensor]] = {}
        # A context variable, so that an observer sees only the forwards of its own thread (or asynchronous task).
        self._observer: ContextVar[Observer | None] = ContextVar("needlework_observer", default=None)
        self.device = next(model.parameters()).device
        self.source: Path | None = None  # the directory or file that the model was loaded from
        self._windows = {layer: part.window for layer, part in self.anatomy.attention_parts()}
        self._devices = {layer: next(module.parameters()).device for module, layer in self.attention.items()}
        self._open = False
        self._trusted = False  # needlework's attention agreed with the model's own (`check_own_maths`)

    def cache_layers(self, half: Half, layer: int) -> tuple[int, ...]:
        """Return the cache layers that hold one half of the memory of a layer."""
        if half == "kv":
            return self._kv_layers.get(layer, ())
        return tuple(mixer.cache_layer for mixer in self.mixers if mixer.layer == layer)

    @property
    def observer(self) -> Observer | None:
        """The observer of the calling thread."""
        return self._observer.get()

    @contextmanager
    def observed_by(self, observer: Observer | None) -> Iterator[None]:
        """Set the observer (None: no observer) of what the calling thread runs while the context is open."""
        before = self._observer.get()
        self._observer.set(observer)
        try:
            yield
        finally:
            self._observer.set(before)

    @cached_property
    def weights(self) -> str:
        """Hash of the weights: of the files that they were loaded from (the hash that stores record).

        A model that was not loaded from files is identified by its tensors, configuration and streaming heads.
        """
        if self.source:
            return weights_hash(self.source)
        config = self.model.config
        total = hashlib.sha256(repr(getattr(config, ENTRY, None)).encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            total.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return f"{OF_TENSORS}{total.hexdigest()[:32]}{AND_CONFIG}{config_hash(config.to_dict())}"

    def check_rankings(self, intervention: Intervention) -> None:
        """Raise an error if a head ranking of this intervention was measured on another model."""
        for ranking in rankings(intervention):
            if ranking.model.weights:
                ranking.check(self.anatomy, self.weights)

    @property
    def continues(self) -> bool:
        """Whether several tokens per forward can follow a prefill; if not, they are fed one by one."""
        return self.family.continues_prefill(self.kernels == "fast")

    @property
    def chunk(self) -> int:
        """The maximum number of tokens per prefill forward; 0: no limit, because the model cannot continue a prefill."""
        return CHUNK_TOKENS if self.continues else 0

    @contextmanager
    def session(self, gradients: bool = False) -> Iterator[None]:
        """Install needlework's attention function and kernels; restore the model on exit, also after an exception.

        Only one session is open at a time: other threads wait, and a nested session is an error. Without `gradients`, it runs
        in inference mode.
        """
        with exclusive_use(), ExitStack() as stack:
            self._open = True
            stack.callback(setattr, self, "_open", False)
            if self.attention:
                stack.enter_context(attention_switched(self.model, NAME))
            if self.kernels == "fast":
                stack.enter_context(fast_kernels(self.model))
            if self.device.type != "cuda":
                stack.enter_context(slow_kernel_hints())
            stack.enter_context(torch.enable_grad() if gradients else torch.inference_mode())
            for module in self.model.modules():
                if module.training:
                    stack.callback(setattr, module, "training", True)  # of this module, but not of its submodules
            self.model.eval()
            yield

    def _empty(self, mixer: Mixer, rows: int) -> Memory:
        """Return an empty memory for a single mixer."""
        return Memory(self.family.make_cache(self.model.config), states_on_modules([mixer]), rows)

    def new_memory(self, rows: int) -> Memory:
        """Return an empty memory for a batch of this many rows."""
        cache = self.family.make_cache(self.model.config)
        return Memory(self.streams.install(cache) if self.streams else cache, states_on_modules(self.mixers), rows)

    def compile(self, rows: Sequence[Sequence[Act]], samples: Sequence[int], phase: Phase, slots: Tensor | None = None) -> Rows:
        """Compile the acts of each row into edits per layer.

        Args:
            samples: [rows] sample keys, which seed random head choices.
            slots: [rows] trial of each row, for the tally; by default, each row has one of its own.
        """
        slots = torch.arange(len(rows), device=self.device) if slots is None else slots
        compiled = Rows(slots, outputs=compile_outputs(rows, samples))
        touched = {act.layer for row in rows for act in row}
        by_layer = {layer: [[act for act in row if act.layer == layer] for row in rows] for layer in touched}
        for layer, part in self.anatomy.attention_parts():
            if layer in touched:
                means = {name: table[layer, phase] for name, table in self.means.items() if (layer, phase) in table}
                edits = compile_layer(by_layer[layer], samples, part.query_heads, means, self._devices[layer])
                edits.outputs = compiled.outputs.pop(("heads", layer), None)
                if not edits.idle:
                    compiled.attention[layer] = edits
        for mixer in self.mixers:
            if mixer.layer in touched:
                mixer_edits = compile_mixer(by_layer[mixer.layer], mixer.groups, mixer.device)
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
        last_only: int | None = None,
        recorded_scores: dict[int, list[Any]] | None = None,
        chunk: int = 0,
    ) -> Tensor:
        """Run the model on the next tokens, in as many forwards as needed, and update the memory in place.

        Args:
            ids: [rows, n] token ids.
            positions: [rows, n] absolute positions; by default they continue at the memory's length.
            keep: tokens whose logits are returned: the last, all, or one per row, given by its index in `ids` [rows].
            last_only: layer of which only the last query's output is used later, so that others need not be computed.
            recorded_scores: if given, head scores of layers with a KeepBest act are appended to it, by layer.
            chunk: maximum number of tokens per prefill forward; 0: the usual one.

        Returns:
            Logits [rows, 1 or n, vocabulary] in float32.
        """
        n, start, chunk = ids.shape[1], memory.length, chunk or CHUNK_TOKENS
        if positions is None:
            positions = torch.arange(start, start + n, device=self.device).expand(ids.shape[0], -1)
        logits: list[Tensor] = []
        with preallocated_cache(memory.cache, start + n) if n > chunk else nullcontext():
            for part in self._parts(start, n, rows, phase, chunk):
                for row, position in enumerate(positions[:, part.start].tolist() if rows.clears else ()):
                    for layer in (layer for layer, cleared in rows.clears.get(position, {}).items() if row in cleared):
                        mask = torch.arange(memory.rows, device=self.device) == row
                        memory.clear([mixer.cache_layer for mixer in self.mixers if mixer.layer == layer], mask)
                        tally.add(layer, phase, "states_cleared", rows.slots[row : row + 1], 1)
                here = (keep - part.start).clamp(0, part.stop - part.start - 1) if isinstance(keep, Tensor) else keep
                forward = Forward(
                    phase,
                    positions[:, part],
                    rows.slots,
                    tally,
                    self.attention,
                    rows.attention,
                    rows.mixers,
                    self.observer,
                    memory.shared,
                    self._windows,
                    self.kernels == "fast",
                    self.family.dense_masks,
                    last_only,
                    recorded_scores,
                    outputs={**rows.outputs},
                )
                out = self._forward(ids[:, part], forward, memory, here)
                if isinstance(keep, Tensor):
                    found = (keep >= part.start)[:, None, None]
                    logits = [torch.where(found, out, logits[0]) if logits else out]
                elif keep == "all" or part.stop == n:
                    logits.append(out)
        return torch.cat(logits, 1) if len(logits) > 1 else logits[0]

    def _parts(self, start: int, n: int, rows: Rows, phase: Phase, chunk: int) -> list[slice]:
        """Return the slices of the n tokens that are fed in one forward each.

        Slices end before positions where a state is cleared. Models that can continue a prefill get long prompts in chunks;
        other models get all tokens after the first slice one by one.
        """
        if start and n > 1 and not self.continues:
            return [slice(i, i + 1) for i in range(n)]
        long = phase == "prefill" and self.continues and not any(x.needs_all_queries for x in rows.attention.values())
        ends = sorted(
            {0, n, *(p - start for p in rows.clears if 0 < p - start < n), *(chunk_boundaries(n, chunk) if long else ())}
        )
        parts = [slice(a, b) for a, b in pairwise(ends)]
        if len(parts) > 1 and not self.continues:
            return [parts[0], *(slice(i, i + 1) for i in range(parts[0].stop, n))]
        return parts

    def _forward(self, ids: Tensor, forward: Forward, memory: Memory, keep: Literal["last", "all"] | Tensor) -> Tensor:
        """Run one forward; `keep` as in `feed`. Returns logits [rows, 1 or n, vocabulary] in float32."""
        if not self._open:
            raise RuntimeError("feed a body inside `with body.session():`")
        if forward.own_maths:
            self.check_own_maths()
        # Hooks are registered on the modules that this batch edits only: torch calls hooked modules more slowly.
        mixers = [mixer for mixer in self.mixers if mixer.layer in forward.mixers]
        hooks = hooked(mixers, memory, self._empty) if mixers else nullcontext()
        with memory.mounted(), current(forward), hooks, self.outputs_hooked(forward):
            wanted = keep[:, None] if isinstance(keep, Tensor) else int(keep == "last")
            out = run_model(self.model, ids, forward.positions, memory, logits_to_keep=wanted)
        memory.length += ids.shape[1]
        logits: Tensor = out.logits
        if isinstance(keep, Tensor):
            if logits.shape[1] > 1:  # the model has no `logits_to_keep` and returns all logits
                logits = logits[torch.arange(len(keep), device=keep.device), keep][:, None]
        elif keep == "last":
            logits = logits[:, -1:]
        return logits.float()

    @cached_property
    def layers(self) -> list[nn.Module] | None:
        """The model's layers: the list that holds every attention module and mixer at the index of its layer; None: no such."""
        paths = {module: f"{path}." for path, module in self.model.named_modules()}
        places = [(paths[module], layer) for module, layer in self.attention.items()]
        places += [(paths[mixer.module], mixer.layer) for mixer in self.mixers]
        for module, path in paths.items():
            if isinstance(module, nn.ModuleList) and all(part.startswith(f"{path}{layer}.") for part, layer in places):
                return list(module)
        return None

    def module_at(self, where: Where) -> nn.Module:
        """Return the module whose output a site is (an attention module, a mixer or a layer); raise if there is none."""
        site, layer = where
        if site == "layers":
            if self.layers is None:
                raise NeedleworkError(
                    f"the layers of {self.anatomy.architecture} are no plain stack, each called once: choose other sites"
                )
            return self.layers[layer]
        modules = {at: module for module, at in self.attention.items()}
        modules = {mixer.layer: mixer.module for mixer in self.mixers} if site == "mixers" else modules
        if layer not in modules:
            raise NeedleworkError(f"{self.anatomy.architecture} has no {site} in layer {layer}; choose from {sorted(modules)}")
        return modules[layer]

    @contextmanager
    def outputs_hooked(self, forward: Forward) -> Iterator[None]:
        """Apply the recordings and patches of a forward to modules' outputs, then show these to the observer."""
        sites = () if forward.observer is None else forward.observer.sites
        if not forward.outputs and not sites:
            yield
            return
        layers = {
            "layers": range(-1, len(self.anatomy.layers)),
            "attention": self.attention.values(),
            "mixers": [mixer.layer for mixer in self.mixers],
        }
        shown = [((site, layer), ShownOutputs(site)) for site in sites for layer in layers[site]]
        with outputs_hooked([*forward.outputs.items(), *shown], self.module_at, get_current):
            yield

    def read_out(self, streams: Tensor) -> Tensor:
        """Return the logits [n, vocabulary] of residual streams [n, ...], as after the last layer. Needs an open session.

        The model runs on n tokens, and the output of its last layer is replaced. So everything that it does after its layers is
        its own: norm, unembedding, scaling and capping of logits.
        """
        ids = torch.zeros(len(streams), 1, dtype=torch.int64, device=self.device)
        last: Where = ("layers", len(self.anatomy.layers) - 1)
        return self.read_at_once(ids, {}, {last: Replacement(streams[:, None])})[:, -1]

    def read_at_once(self, ids: Tensor, edits: dict[int, LayerEdits], outputs: dict[Where, Edits]) -> Tensor:
        """Return logits [rows, tokens, vocabulary] of one forward without a cache, under these edits. Needs an open session."""
        positions = torch.arange(ids.shape[1], device=self.device).expand(len(ids), -1)
        slots, fast = torch.arange(len(ids), device=self.device), self.kernels == "fast"
        forward = Forward("prefill", positions, slots, Tally(len(ids)), self.attention, edits, fast=fast, outputs=outputs)
        with self.new_memory(len(ids)).mounted(), current(forward), self.outputs_hooked(forward):
            logits: Tensor = run_model(self.model, ids, positions, None).logits
        return logits.float()

    def check_own_maths(self) -> None:
        """Raise unless needlework's attention reproduces the model's own logits on a short prompt (see `agree`).

        Runs once per model, before needlework's attention first replaces stock SDPA.
        """
        if self._trusted:
            return
        self._trusted = True  # `feed` below calls this method again
        ids = (torch.arange(_CHECKED_TOKENS, device=self.device) * 7 % self.anatomy.vocabulary)[None]
        parts = list(self.anatomy.attention_parts())
        no_limit: list[Act] = [LimitKeys(layer, 1 << 30, 0) for layer, _ in parts]
        of_heads: list[Act] = [LimitKeys(layer, 1 << 30, 0, frozenset(range(part.query_heads))) for layer, part in parts]
        answers = []
        with self.observed_by(None):
            for acts in ([], no_limit, of_heads):  # stock SDPA; the compiled kernel, where supported; tensor operations
                rows = self.compile([acts], [0], "prefill")
                answers.append(self.feed(ids, self.new_memory(1), "prefill", rows, Tally(1), keep="all"))
        if not all(self.agree(answers[0], other) for other in answers[1:]):
            self._trusted = False
            apart = float((answers[0] - torch.stack(answers[1:])).abs().max() / answers[0].abs().max().clamp_min(1e-6))
            raise NeedleworkError(
                f"needlework's attention differs from {self.anatomy.architecture}'s own by {apart:.1e} of its largest logit on a"
                " short prompt: this model's attention does something that needlework does not know. Nothing was run"
            )

    def agree(self, logits: Tensor, others: Tensor) -> bool:
        """Return whether logits [rows, tokens, vocabulary] of two implementations are equal up to rounding."""
        each = (logits - others).abs().amax(-1) / logits.abs().max().clamp_min(1e-6)  # [rows, tokens] relative difference
        if self.model.dtype == torch.float32:
            return bool(each.max() <= 1e-3)
        return bool(each.median() <= 0.1)  # in half precision, rounding may route a token to another expert

    def check_length(self, tokens: int) -> None:
        """Raise an error if the model's maximum number of positions is below `tokens`."""
        most = self.anatomy.max_tokens
        if most is not None and tokens > most:
            raise NeedleworkError(
                f"{tokens} tokens are more than the {most} that {self.anatomy.architecture} allows;"
                " shorten the prompt or the answer"
            )


@contextmanager
def differentiable(body: HookedModel) -> Iterator[None]:
    """Open a session in which gates on heads get gradients and weights do not."""
    if body.streams:
        raise NeedleworkError(
            "gates are differentiated without a cache, and the heads of this model stream by theirs: rank the model that it was"
            " pruned from, or choose another method, such as leave_one_out"
        )
    with body.session(gradients=True), ExitStack() as stack:
        for parameter in body.model.parameters():
            if parameter.requires_grad:
                stack.callback(parameter.requires_grad_, True)
                parameter.requires_grad_(False)
        yield


def answer_log_p(
    body: HookedModel,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    gates: Tensor | None = None,
    outputs: Mapping[Where, Edits] | None = None,
) -> Tensor:
    """Return the log-likelihood of each answer given its prompt, [rows]. Needs an open `differentiable` session.

    Prompt and answer are computed in one forward without a cache. Shorter rows are padded on the right, which causal models do
    not see.

    Args:
        texts: pairs of prompt and answer as token ids.
        gates: [rows or 1, heads], in the order of `anatomy.heads`: 1 leaves a head unchanged, 0 zeroes it.
        outputs: what is done to the outputs of sites.
    """
    rows = [(*prompt, *answer[:-1]) for prompt, answer in texts]
    longest = max(map(len, rows))
    body.check_length(longest)
    ids = torch.tensor([row + row[-1:] * (longest - len(row)) for row in rows], device=body.device)
    edits = {layer: LayerEdits(outputs=edit) for (site, layer), edit in (outputs or {}).items() if site == "heads"}
    if gates is not None:
        parts = list(body.anatomy.attention_parts())
        by_layer = torch.split(gates, [part.query_heads for _, part in parts], dim=1)
        edits = {layer: LayerEdits(gates=of_layer) for (layer, _), of_layer in zip(parts, by_layer, strict=True)}
    others = {where: edit for where, edit in (outputs or {}).items() if where[0] != "heads"}
    log_p = body.read_at_once(ids, edits, others).log_softmax(-1)
    sums = []
    for i, (prompt, answer) in enumerate(texts):
        says = log_p[i, len(prompt) - 1 : len(prompt) - 1 + len(answer)]
        sums.append(says.gather(1, torch.tensor(answer, device=body.device)[:, None]).sum())
    return torch.stack(sums)


def chunk_boundaries(tokens: int, most: int) -> set[int]:
    """Return the boundaries of chunks of at most `most` tokens.

    Chunks are as equal as possible, so that none has a single token, which a mixer could take for a decode step.
    """
    count = -(-tokens // most)
    return {tokens * i // count for i in range(1, count)}


# --- Exclusive use: while a model runs, code of its family is replaced for all its models, and states may lie on modules -----

_taken = threading.Lock()
_holder: int | None = None  # the thread that holds the lock


@contextmanager
def exclusive_use() -> Iterator[None]:
    """Wait until no other thread uses a model, then hold the lock while the context is open; raise if this one holds it."""
    global _holder
    thread = threading.get_ident()
    if _holder == thread:
        gc.collect()  # closes an abandoned engine.run(...) iterator that a reference cycle keeps alive
    if _holder == thread:
        raise NeedleworkError(
            "a model is already answering in this thread: inside an intervention no model can be asked, and an iteration over"
            " engine.run(...) must be finished or closed first"
        )
    with _taken:
        _holder = thread
        try:
            yield
        finally:
            _holder = None


@contextmanager
def withheld(logger: str, part: str) -> Iterator[list[str]]:
    """Collect a logger's messages that contain `part` instead of showing them, at any verbosity."""
    log = logging.getLogger(logger)
    level, shown = log.level, log.isEnabledFor(logging.WARNING)
    collected: list[str] = []

    def let_through(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if part not in text:
            return shown or record.levelno > logging.WARNING
        collected.append(text)
        return False

    log.addFilter(let_through)
    if not shown:
        log.setLevel(logging.WARNING)
    try:
        yield collected
    finally:
        log.setLevel(level)
        log.removeFilter(let_through)


def slow_kernel_hints() -> AbstractContextManager[list[str]]:
    """Suppress advice to install GPU kernels: they do not run on a CPU, where needlework has kernels of its own."""
    return withheld("transformers.integrations.hub_kernels", "is falling back to its reference")
