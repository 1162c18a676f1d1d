"""needlework: which attention does the retrieving in a hybrid language model, and what is the rest for?"""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` would take longer to come in than all else here, and a stop must be quiet from the first moment

if TYPE_CHECKING:
    from needlework import tasks
    from needlework.anatomy import Anatomy, Group, Head
    from needlework.calibration import Means, calibrate
    from needlework.checkup.doctor import doctor
    from needlework.checkup.findings import Checkup
    from needlework.errors import NeedleworkError, TrialError
    from needlework.experiments.heads import rank, smallest_set
    from needlework.experiments.result import Result
    from needlework.experiments.run import run
    from needlework.heads.recurrent import recurrent_side
    from needlework.interventions import (
        NONE,
        AblateAttention,
        AblateHeads,
        AblateRecurrent,
        AblateRecurrentGroups,
        ChangeOutputs,
        ExposeTokens,
        Intervention,
        KeepHeads,
        LimitContext,
        OnlyHeads,
        Part,
        Ranking,
        ResetState,
        SwapMemory,
        head_score,
        parse,
        register,
    )
    from needlework.observation import observe
    from needlework.pruning.prune import prune
    from needlework.report import report
    from needlework.requests import Answer, Request, sample_key
    from needlework.store import Store
    from needlework.subject import Subject, load, wrap

__version__ = "0.6.0"

_LAZY = {  # name -> its module: brought in when first used, so that `import needlework` is done at once
    "AblateAttention": "interventions",
    "AblateHeads": "interventions",
    "AblateRecurrent": "interventions",
    "AblateRecurrentGroups": "interventions",
    "Anatomy": "anatomy",
    "Answer": "requests",
    "Checkup": "checkup.findings",
    "ChangeOutputs": "interventions",
    "ExposeTokens": "interventions",
    "Group": "anatomy",
    "Head": "anatomy",
    "Intervention": "interventions",
    "KeepHeads": "interventions",
    "LimitContext": "interventions",
    "Means": "calibration",
    "NONE": "interventions",
    "NeedleworkError": "errors",
    "OnlyHeads": "interventions",
    "Part": "interventions",
    "Ranking": "interventions",
    "Request": "requests",
    "ResetState": "interventions",
    "Result": "experiments.result",
    "Store": "store",
    "Subject": "subject",
    "SwapMemory": "interventions",
    "TrialError": "errors",
    "calibrate": "calibration",
    "doctor": "checkup.doctor",
    "head_score": "interventions",
    "load": "subject",
    "observe": "observation",
    "parse": "interventions",
    "prune": "pruning.prune",
    "rank": "experiments.heads",
    "recurrent_side": "heads.recurrent",
    "register": "interventions",
    "report": "report",  # a package that can be called
    "run": "experiments.run",
    "sample_key": "requests",
    "smallest_set": "experiments.heads",
    "tasks": "tasks",
    "wrap": "subject",
}

__all__ = [
    "NONE",
    "AblateAttention",
    "AblateHeads",
    "AblateRecurrent",
    "AblateRecurrentGroups",
    "Anatomy",
    "Answer",
    "ChangeOutputs",
    "Checkup",
    "ExposeTokens",
    "Group",
    "Head",
    "Intervention",
    "KeepHeads",
    "LimitContext",
    "Means",
    "NeedleworkError",
    "OnlyHeads",
    "Part",
    "Ranking",
    "Request",
    "ResetState",
    "Result",
    "Store",
    "Subject",
    "SwapMemory",
    "TrialError",
    "__version__",
    "calibrate",
    "doctor",
    "head_score",
    "load",
    "observe",
    "parse",
    "prune",
    "rank",
    "recurrent_side",
    "register",
    "report",
    "run",
    "sample_key",
    "smallest_set",
    "tasks",
    "wrap",
]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'needlework' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"needlework.{_LAZY[name]}")
    return module if name == _LAZY[name] else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
