"""`needlework doctor`: checks on one model of the properties (laws) that all measurements rely on.

Here are the results: a Check for each law, and a Checkup with all of them. They do not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pandas

Outcome = Literal["pass", "fail", "does not apply"]


@dataclass(frozen=True)
class Check:
    """The result of one law on one model.

    Attributes:
        law: Name of the law.
        says: What must hold.
        outcome: "pass", "fail" or "does not apply".
        why: What was observed, or why the law does not apply.
        measured: The largest difference, in standard deviations of the model's logits.
        allowed: The largest difference that passes.
        seconds: How long the check took.
        shown: Lines to check by eye.
    """

    law: str
    says: str
    outcome: Outcome
    why: str
    measured: float | None = None
    allowed: float | None = None
    seconds: float = 0.0
    shown: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checkup:
    """Results of all laws on one model, in one dtype, on one device.

    Attributes:
        model: Architecture of the model.
        checks: The result of each law.
        versions: Versions of needlework, torch and transformers, and device, dtype and kernels.
        at: Time in UTC, ISO format.
        quick: Whether only short prompts were tried, so that longer sliding windows were not checked.
        identity: Hashes of weights and tokenizer, and versions; set by runs.
    """

    model: str
    checks: tuple[Check, ...]
    versions: Mapping[str, str]
    at: str
    quick: bool = False
    identity: Mapping[str, str] = field(default_factory=dict)

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

    def frame(self) -> pandas.DataFrame:
        """Return one row per law: outcome, measured and allowed difference, and why."""
        import pandas

        columns = ["law", "outcome", "measured", "allowed", "why"]
        frame = pandas.DataFrame([[getattr(check, name) for name in columns] for check in self.checks], columns=columns)
        return frame.astype({"measured": float, "allowed": float})

    def _repr_html_(self) -> str:
        from needlework.tables import Table

        return Table.from_frame(self.frame(), self.verdict()).to_html()

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "sound": self.sound}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Checkup:
        """Read what `to_dict` wrote."""
        fields = {name: value for name, value in content.items() if name != "sound"}
        checks = tuple(Check(**{**check, "shown": tuple(check["shown"])}) for check in content["checks"])
        return cls(**{**fields, "checks": checks})
