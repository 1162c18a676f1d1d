"""What can be done to a model: frozen values that compose with `+` and have a text form. Free of torch."""

from needlework.interventions.attention import (
    AblateAttention,
    AblateHeads,
    ExposeTokens,
    KeepHeads,
    LimitContext,
    OnlyHeads,
)
from needlework.interventions.base import NONE, Intervention, Part, register, registered
from needlework.interventions.memory import AblateRecurrent, ResetState, SwapMemory
from needlework.interventions.text import parse

__all__ = [
    "NONE",
    "AblateAttention",
    "AblateHeads",
    "AblateRecurrent",
    "ExposeTokens",
    "Intervention",
    "KeepHeads",
    "LimitContext",
    "OnlyHeads",
    "Part",
    "ResetState",
    "SwapMemory",
    "parse",
    "register",
    "registered",
]
