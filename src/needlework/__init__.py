"""needlework: which attention does the retrieving in a hybrid language model, and what is the rest for?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from needlework.anatomy import Anatomy, Head
from needlework.errors import NeedleworkError, TrialError
from needlework.interventions import (
    NONE,
    AblateAttention,
    AblateHeads,
    AblateRecurrent,
    ExposeTokens,
    Intervention,
    KeepHeads,
    LimitContext,
    OnlyHeads,
    Part,
    ResetState,
    SwapMemory,
    parse,
    register,
)
from needlework.interventions.ranking import Ranking

if TYPE_CHECKING:
    from needlework.calibration import Means, calibrate
    from needlework.observation import observe
    from needlework.subject import Subject, load, wrap

__version__ = "0.1.0"

_NEEDS_TORCH = {  # brought in when first used, so that `import needlework` stays quick and free of torch
    "Means": "calibration",
    "calibrate": "calibration",
    "observe": "observation",
    "Subject": "subject",
    "load": "subject",
    "wrap": "subject",
}

__all__ = [
    "NONE",
    "AblateAttention",
    "AblateHeads",
    "AblateRecurrent",
    "Anatomy",
    "ExposeTokens",
    "Head",
    "Intervention",
    "KeepHeads",
    "LimitContext",
    "Means",
    "NeedleworkError",
    "OnlyHeads",
    "Part",
    "Ranking",
    "ResetState",
    "Subject",
    "SwapMemory",
    "TrialError",
    "calibrate",
    "load",
    "observe",
    "parse",
    "register",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TORCH:
        from importlib import import_module

        return getattr(import_module(f"needlework.{_NEEDS_TORCH[name]}"), name)
    raise AttributeError(f"module 'needlework' has no attribute {name!r}")
