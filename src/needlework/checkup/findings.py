"""What the doctor found: a Check for each law, and a Checkup of all of them. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["pass", "fail", "does not apply"]


@dataclass(frozen=True)
class Check:
    """One law, tried on one model."""

    law: str
    says: str  # what must hold
    outcome: Outcome
    why: str  # what was seen, or why the law does not apply
    measured: float | None = None  # in standard deviations of the model's logits
    allowed: float | None = None
    seconds: float = 0.0
    shown: tuple[str, ...] = ()  # what a person should see for themselves, line by line


@dataclass(frozen=True)
class Checkup:
    """All laws, tried on one model in one precision on one device by one version of the software."""

    model: str  # its architecture
    checks: tuple[Check, ...]
    versions: Mapping[str, str]  # needlework, torch, transformers, device, dtype, kernels
    at: str  # when, in UTC
    quick: bool = False  # short prompts only: window edges that lie beyond them were not looked at
    identity: Mapping[str, str] = field(default_factory=dict)  # of the model, where a run asked: weights, tokenizer ...

    @property
    def sound(self) -> bool:
        """No law failed."""
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
        """The result in one sentence."""
        others = f"; {count} do not apply" if (count := self.count("does not apply")) else ""
        if self.sound:
            return f"{self.model}: all {self.count('pass')} laws hold{others}"
        names = ", ".join(check.law for check in self.failed)
        return f"{self.model}: {len(self.failed)} of {len(self.checks)} laws fail ({names}): believe no number of this model"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "sound": self.sound}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Checkup:
        """What `to_dict` wrote."""
        fields = {name: value for name, value in content.items() if name != "sound"}
        checks = tuple(Check(**{**check, "shown": tuple(check["shown"])}) for check in content["checks"])
        return cls(**{**fields, "checks": checks})
