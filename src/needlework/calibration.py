"""Measure the mean output of every head, for interventions that replace a head's output by its mean."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from needlework.errors import NeedleworkError
from needlework.interventions.acts import ChangeOutputs, Phase, Place
from needlework.receipts import Tally
from needlework.requests import check_tokens

if TYPE_CHECKING:
    from needlework.subject import Prompt, Subject

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
        save_file({f"{layer}.{phase}": t.contiguous() for (layer, phase), t in self.tensors.items()}, str(path))

    @classmethod
    def load(cls, path: Path | str) -> Means:
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
            memory, slot = body.new_memory(1), torch.zeros(1, dtype=torch.int64, device=body.device)
            singles = [ids[:, t : t + 1] for t in range(split, ids.shape[1])]
            fed: dict[Phase, list[Tensor]] = {"prefill": [ids[:, :split]], "decode": singles}
            for phase, parts in fed.items():
                rows = body.compile([acts], [0], phase, slot)
                for part in parts:
                    body.feed(part, memory, phase, rows, Tally(1))
    if not sums:
        raise NeedleworkError("calibrate needs at least one text, and a model with attention layers")
    means = Means({key: (total / counts[key]).float().cpu() for key, total in sums.items()})
    subject.use(means)
    return means
