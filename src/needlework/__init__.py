"""needlework: which attention does the retrieving in a hybrid language model, and what is the rest for?"""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` would take longer to come in than all else here, and a stop must be quiet from the first moment

if TYPE_CHECKING:
    from needlework import tasks as tasks
    from needlework.anatomy import Anatomy as Anatomy
    from needlework.anatomy import Group as Group
    from needlework.anatomy import Head as Head
    from needlework.calibration import Means as Means
    from needlework.calibration import calibrate as calibrate
    from needlework.checks import Checkup as Checkup
    from needlework.checks.doctor import doctor as doctor
    from needlework.errors import NeedleworkError as NeedleworkError
    from needlework.errors import TrialError as TrialError
    from needlework.experiments.heads import rank as rank
    from needlework.experiments.heads import smallest_set as smallest_set
    from needlework.experiments.result import Result as Result
    from needlework.experiments.run import run as run
    from needlework.heads.recurrent import recurrent_side as recurrent_side
    from needlework.interventions import NONE as NONE
    from needlework.interventions import AblateAttention as AblateAttention
    from needlework.interventions import AblateHeads as AblateHeads
    from needlework.interventions import AblateRecurrent as AblateRecurrent
    from needlework.interventions import AblateRecurrentGroups as AblateRecurrentGroups
    from needlework.interventions import ChangeOutputs as ChangeOutputs
    from needlework.interventions import ExposeTokens as ExposeTokens
    from needlework.interventions import Intervention as Intervention
    from needlework.interventions import KeepHeads as KeepHeads
    from needlework.interventions import LimitContext as LimitContext
    from needlework.interventions import OnlyHeads as OnlyHeads
    from needlework.interventions import Part as Part
    from needlework.interventions import Ranking as Ranking
    from needlework.interventions import ResetState as ResetState
    from needlework.interventions import SwapMemory as SwapMemory
    from needlework.interventions import head_score as head_score
    from needlework.interventions import parse as parse
    from needlework.interventions import register as register
    from needlework.observation import observe as observe
    from needlework.pruning.prune import prune as prune
    from needlework.reports import report as report
    from needlework.requests import Answer as Answer
    from needlework.requests import Request as Request
    from needlework.requests import sample_key as sample_key
    from needlework.results import Store as Store
    from needlework.subject import Subject as Subject
    from needlework.subject import load as load
    from needlework.subject import wrap as wrap

__version__ = "0.6.0"

_LAZY = {  # name -> its module: brought in when first used, so that `import needlework` is done at once
    "AblateAttention": "interventions",
    "AblateHeads": "interventions",
    "AblateRecurrent": "interventions",
    "AblateRecurrentGroups": "interventions",
    "Anatomy": "anatomy",
    "Answer": "requests",
    "Checkup": "checks",
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
    "Store": "results",
    "Subject": "subject",
    "SwapMemory": "interventions",
    "TrialError": "errors",
    "calibrate": "calibration",
    "doctor": "checks.doctor",
    "head_score": "interventions",
    "load": "subject",
    "observe": "observation",
    "parse": "interventions",
    "prune": "pruning.prune",
    "rank": "experiments.heads",
    "recurrent_side": "heads.recurrent",
    "register": "interventions",
    "report": "reports",
    "run": "experiments.run",
    "sample_key": "requests",
    "smallest_set": "experiments.heads",
    "tasks": "tasks",
    "wrap": "subject",
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'needlework' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"needlework.{_LAZY[name]}")
    return module if name == _LAZY[name] else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
