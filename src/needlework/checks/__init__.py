"""`needlework doctor`: checks on one model of the properties (laws) that all measurements rely on.

Here are the results: a Check for each law, and a Checkup with all of them. They do not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["pass", "fail", "does not apply"]


@dataclass(frozen=True)
class Check:
    """The result of one law on one model."""

    law: str
    says: str  # what must hold
    outcome: Outcome
    why: str  # what was observed, or why the law does not apply
    measured: float | None = None  # in standard deviations of the model's logits
    allowed: float | None = None
    seconds: float = 0.0
    shown: tuple[str, ...] = ()  # lines to check by eye


@dataclass(frozen=True)
class Checkup:
    """Results of all laws on one model, in one dtype, on one device, with the software versions in `versions`."""

    model: str  # architecture
    checks: tuple[Check, ...]
    versions: Mapping[str, str]  # needlework, torch, transformers, device, dtype, kernels
    at: str  # time in UTC, ISO format
    quick: bool = False  # short prompts only: longer sliding windows were not checked
    identity: Mapping[str, str] = field(default_factory=dict)  # set by runs: hashes of weights and tokenizer, versions

    @property
    def sound(self) -> bool:
        """Whether no law failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.outcome == "fail")

    def count(self, outcome: Outcome) -> int:
        return sum(check.outcome == outcome for check in self.checks)

    def __getitem__(self, law: str) -> Check:
        return next(check for check in self.checks if check.law == law)

    def __str__(self) -> str:
        lines = [f"{check.law}: {check.outcome} ({check.why})" for check in self.checks]
        return "\n".join([*lines, self.verdict()])

    def verdict(self) -> str:
        """Return the result in one sentence."""
        others = f"; {count} do not apply" if (count := self.count("does not apply")) else ""
        if self.sound:
            return f"{self.model}: all {self.count('pass')} laws hold{others}"
        names = ", ".join(check.law for check in self.failed)
        return f"{self.model}: {len(self.failed)} of {len(self.checks)} laws fail ({names}): believe no number of this model"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "sound": self.sound}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Checkup:
        """Read what `to_dict` wrote."""
        fields = {name: value for name, value in content.items() if name != "sound"}
        checks = tuple(Check(**{**check, "shown": tuple(check["shown"])}) for check in content["checks"])
        return cls(**{**fields, "checks": checks})
