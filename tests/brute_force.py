"""An independent reference for interventions on attention: plain loops over layers, heads and queries.

It runs the stock model with its own eager attention, reads the probabilities that this returns, and rewrites what each
head says for each query by itself. It shares no code with `needlework.model.attention`; it knows interventions by their public
fields only. Phases are taken from positions: in one full forward, tokens from `prompt_tokens - 1` on count as decoded.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

import needlework as nw
from needlework.interventions.acts import draw
from needlework.interventions.base import Part

NAME = "brute_force"
NEAR = 1e-5  # closer than this, two right implementations may choose different heads


class Run:
    """One full forward under one intervention, and what was counted on the way."""

    def __init__(
        self, model: Any, intervention: nw.Intervention, prompt_tokens: int, needle: tuple[int, ...] = (), sample: int = 0
    ) -> None:
        self.parts, self.prompt_tokens, self.needle, self.sample = intervention.parts, prompt_tokens, needle, sample
        self.model = model
        self.counts: dict[tuple[int, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.first_near_tie: int | None = None  # from this token on, logits cannot be compared
        self._paths = {module: path for path, module in model.named_modules()}
        self._turns: dict[Any, int] = {}

    def logits(self, ids: Tensor) -> Tensor:
        token = _RUN.set(self)
        before = self.model.config.get_text_config(decoder=True)._attn_implementation
        composite = "text_config" in self.model.config.sub_configs
        self.model.set_attn_implementation({"text_config": NAME} if composite else NAME)
        known = self.model.forward.__code__.co_varnames
        positions = {"position_ids": torch.arange(ids.shape[1])[None]} if "position_ids" in known else {}
        try:
            with torch.no_grad():
                return self.model(input_ids=ids, use_cache=False, **positions).logits
        finally:
            self.model.set_attn_implementation({"text_config": before} if composite else before)
            _RUN.reset(token)

    def layer(self, module: Any) -> int:
        """The number in the module's path; where two stacks repeat numbers, its turn."""
        turn = self._turns.setdefault(module, len(self._turns))
        stacks = {path.split(".layers.")[0] for m, path in self._paths.items() if type(m) is type(module)}
        match = re.search(r"layers\.(\d+)", self._paths[module])
        assert match
        return turn if len(stacks) > 1 else int(match.group(1))

    def acting(self, kind: type[Part], layer: int, query: int) -> Any:
        phase = "decode" if query >= self.prompt_tokens - 1 else "prefill"
        for part in self.parts:
            if type(part) is kind and part.phase in (phase, "both") and (part.layers is None or layer in part.layers):
                return part
        return None

    def count(self, layer: int, query: int, what: str, amount: int) -> None:
        phase = "decode" if query >= self.prompt_tokens - 1 else "prefill"
        if amount:
            self.counts[layer, phase][what] += amount

    # --- one attention module -------------------------------------------------------------------------------------

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **kwargs: Any) -> Tensor:
        layer, queries, heads = self.layer(module), query.shape[2], query.shape[1]
        mask = mask.clone().clamp(min=torch.finfo(mask.dtype).min)
        visible = mask[0, 0, :queries] > torch.finfo(mask.dtype).min / 2  # [queries, keys]
        for q in range(queries):
            self.count(layer, q, "positions", 1)
            self._limit(layer, q, visible, mask)
        mask = mask.repeat(1, heads if self._blocks else 1, 1, 1)  # heads may see different keys
        for q in range(queries):
            self._block(layer, q, visible, mask)
        eager = sys.modules[type(module).__module__].eager_attention_forward
        _, p = eager(module, query, key, value, mask, **kwargs)  # [1, heads, queries, keys]
        p, value = p[0].float(), value[0].repeat_interleave(heads // value.shape[1], 0).float()
        out = torch.zeros(1, queries, heads, value.shape[-1])
        authors = self._authors(layer, p, visible)
        for q in range(queries):
            seen = [int(k) for k in visible[q].nonzero()[:, 0]]
            rewritten = self._expose(layer, q, p[:, q], seen)
            for h in range(heads):
                out[0, q, h] = torch.tensor([rewritten[h][k] for k in seen]) @ value[h, seen]
                if (q, h) in authors:
                    out[0, q, h] = authors[q, h] @ value[h]
            plain = torch.stack([p[h, q, seen] @ value[h, seen] for h in range(heads)])  # scores come before exposure
            self._keep(layer, q, p[:, q], seen, plain, out[0, q])
            for part in (nw.AblateHeads, nw.OnlyHeads):
                self._silence(part, layer, q, out[0, q])
            if self.acting(nw.AblateAttention, layer, q):
                out[0, q] = 0.0
                self.count(layer, q, "heads_zeroed", heads)
        return out.to(query.dtype)

    def _limit(self, layer: int, q: int, visible: Tensor, mask: Tensor) -> None:
        part = self.acting(nw.LimitContext, layer, q)
        for k in range(visible.shape[1]) if part else ():
            if visible[q, k] and q - k >= part.tokens and k >= part.sinks:
                visible[q, k] = False
                mask[:, :, q, k] = torch.finfo(mask.dtype).min
                self.count(layer, q, "keys_hidden", 1)

    @property
    def _blocks(self) -> list[nw.BlockAttention]:
        return [part for part in self.parts if isinstance(part, nw.BlockAttention)]

    def _block(self, layer: int, q: int, visible: Tensor, mask: Tensor) -> None:
        """Hide edges of single heads by the additive mask alone: `visible` is what any head sees."""
        phase = "decode" if q >= self.prompt_tokens - 1 else "prefill"
        blocked = set()
        for part in self._blocks:
            spans = {"needle": self.needle, "answer": range(self.prompt_tokens - 1, 10**6), None: range(10**6)}
            meant = spans.get(part.from_, part.from_)
            keys = spans.get(part.to, part.to)
            if part.phase not in (phase, "both") or q not in meant or (part.layers and layer not in part.layers):
                continue
            for h in range(mask.shape[1]):
                if part.heads is None or (layer, h) in part.heads:
                    for k in (k for k in keys if k < q and visible[q, k]):
                        mask[:, h, q, k] = torch.finfo(mask.dtype).min
                        blocked.add(k)
        self.count(layer, q, "edges_blocked", len(blocked))

    def _expose(self, layer: int, q: int, p: Tensor, seen: list[int]) -> list[dict[int, float]]:
        """New probabilities of every head over the keys that this query sees."""
        rows = [{k: float(row[k]) for k in seen} for row in p]
        part = self.acting(nw.ExposeTokens, layer, q)
        if part is None or part.mode == "keep" or part.compat == "paper":
            return rows
        needle = [k for k in seen if k in self.needle]
        self.count(layer, q, "columns_exposed", len(needle))
        touched = {"omit": len(needle), "only": len(seen) - len(needle)}.get(part.mode, len(seen))
        self.count(layer, q, "columns_touched", touched)
        mean_mass = sum(row[k] for row in rows for k in needle) / len(rows)
        new = []
        for row in rows:
            if part.mode == "balanced":
                changed = {k: mean_mass / len(needle) if k in needle else 0.0 for k in seen}
            else:
                kept = {"omit": lambda k: k not in needle, "only": lambda k: k in needle, "null": lambda k: False}[part.mode]
                changed = {k: row[k] if kept(k) else 0.0 for k in seen}
            left = sum(changed.values())
            new.append({k: x / left if left else 0.0 for k, x in changed.items()} if part.renormalize else changed)
        return new

    def _authors(self, layer: int, p: Tensor, visible: Tensor) -> dict[tuple[int, int], Tensor]:
        """What the paper authors' code makes of the probabilities [keys] of a (query, head), where it rewrites them.

        Their prefill is one matrix: every row is rewritten, also one that sees no needle column, and `balanced` sums over
        its rows. Their decode has one row, which stays as it is if no needle column is visible.
        """
        heads, queries, keys = p.shape
        new: dict[tuple[int, int], Tensor] = {}
        parts = {q: part for q in range(queries) if (part := self.acting(nw.ExposeTokens, layer, q)) and part.compat == "paper"}
        prefill = [q for q in parts if q < self.prompt_tokens - 1]
        for q, part in parts.items():
            rows = prefill if q in prefill else [q]
            needle = [k for k in self.needle if any(visible[row, k] for row in rows)]
            if part.mode == "keep" or (q not in prefill and not needle):
                continue
            for h in range(heads):
                row = new[q, h] = torch.zeros(keys)
                for k in range(keys):
                    if part.mode == "omit" and k not in needle:
                        row[k] = p[h, q, k]
                    if part.mode == "only" and k in needle:
                        row[k] = p[h, q, k]
                    if part.mode == "balanced" and k in needle:
                        row[k] = p[:, rows][:, :, needle].sum() / heads / len(needle)
        return new

    def _keep(self, layer: int, q: int, p: Tensor, seen: list[int], plain: Tensor, out: Tensor) -> None:
        part = self.acting(nw.KeepHeads, layer, q)
        if part is None:
            return
        heads = out.shape[0]
        scores: list[float] = []
        for h in range(heads):
            row = p[h, [key for key in seen if key >= part.sinks]].double()
            if part.sinks:
                row = row / row.sum() if row.sum() > 0 else row
            if part.by == "entropy":
                scores.append(float((row * row.clamp_min(1e-300).log()).sum()))
            elif part.by == "l2":
                scores.append(float((row * row).sum().sqrt()))
            elif part.by == "norm":
                scores.append(float(plain[h].double().norm()))
            else:
                number = draw(part.seed, self.sample, layer, q, h)
                scores.append(float((number - (1 << 64) if number >> 63 else number) >> 40))
        k = part.k if part.k is not None else int(part.fraction * heads + 0.5)
        order = sorted(range(heads), key=lambda h: (-scores[h], h))
        if 0 < k < heads and 0 < scores[order[k - 1]] - scores[order[k]] < NEAR and self.first_near_tie is None:
            self.first_near_tie = q
        for h in order[k:]:
            out[h] = 0.0
        self.count(layer, q, "heads_zeroed", heads - k)

    def _silence(self, kind: type[nw.AblateHeads], layer: int, q: int, out: Tensor) -> None:
        part = self.acting(kind, layer, q)
        if part is None:
            return
        named = [head.index for head in part.heads if head.layer == layer]
        off = named if kind is nw.AblateHeads else [h for h in range(out.shape[0]) if h not in named]
        for h in off:
            out[h] = 0.0
        self.count(layer, q, "heads_zeroed", len(off))


_RUN: ContextVar[Run | None] = ContextVar("brute_force_run", default=None)


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
    run = _RUN.get()
    assert run is not None
    return run.attend(module, query, key, value, mask, **kwargs), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, eager_mask)
