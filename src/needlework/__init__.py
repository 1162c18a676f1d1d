"""needlework: which attention does the retrieving in a hybrid language model, and what is the rest for?"""

from __future__ import annotations

TYPE_CHECKING = False  # of `typing`, which takes longer to import than everything else here

if TYPE_CHECKING:  # the one list of public names: type checkers run these imports, and `_public` reads them
    from needlework import tasks as tasks
    from needlework.anatomy import Anatomy as Anatomy
    from needlework.anatomy import Group as Group
    from needlework.anatomy import Head as Head
    from needlework.checks import Checkup as Checkup
    from needlework.checks.doctor import doctor as doctor
    from needlework.errors import NeedleworkError as NeedleworkError
    from needlework.errors import TrialError as TrialError
    from needlework.experiments.heads import compare_heads as compare_heads
    from needlework.experiments.heads import rank as rank
    from needlework.experiments.heads import smallest_set as smallest_set
    from needlework.experiments.result import Result as Result
    from needlework.experiments.run import run as run
    from needlework.heads.compare import HeadComparison as HeadComparison
    from needlework.heads.recurrent import recurrent_side as recurrent_side
    from needlework.interventions import NONE as NONE
    from needlework.interventions import AblateAttention as AblateAttention
    from needlework.interventions import AblateHeads as AblateHeads
    from needlework.interventions import AblateRecurrent as AblateRecurrent
    from needlework.interventions import AblateRecurrentGroups as AblateRecurrentGroups
    from needlework.interventions import BlockAttention as BlockAttention
    from needlework.interventions import BlockRecurrent as BlockRecurrent
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
    from needlework.lens import LogitLens as LogitLens
    from needlework.lens import logit_lens as logit_lens
    from needlework.observation import observe as observe
    from needlework.patching import Patching as Patching
    from needlework.patching import patch as patch
    from needlework.pruning.budget import ServingBudget as ServingBudget
    from needlework.pruning.budget import budget as budget
    from needlework.pruning.llama_cpp import write_gguf as write_gguf
    from needlework.pruning.prune import prune as prune
    from needlework.recurrence import recurrent_contributions as recurrent_contributions
    from needlework.recurrence import recurrent_mass as recurrent_mass
    from needlework.reports import report as report
    from needlework.requests import Answer as Answer
    from needlework.requests import Request as Request
    from needlework.requests import sample_key as sample_key
    from needlework.results import Store as Store
    from needlework.subject import Means as Means
    from needlework.subject import Subject as Subject
    from needlework.subject import calibrate as calibrate
    from needlework.subject import load as load
    from needlework.subject import wrap as wrap

__version__ = "0.6.0"

_modules: dict[str, str] = {}  # public name -> its module


def _public() -> dict[str, str]:
    """Return the module of every public name, read from the imports above when the first name is used."""
    if not _modules:
        import ast

        with open(__file__, encoding="utf-8") as file:
            tree = ast.parse(file.read())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(__name__):
                _modules.update({alias.name: node.module for alias in node.names})
    return _modules


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that `import needlework` is fast."""
    if name == "__all__":
        return ["__version__", *_public()]
    if name.startswith("_") or name not in _public():
        raise AttributeError(f"module 'needlework' has no attribute {name!r}")
    from importlib import import_module

    if _modules[name] == __name__:
        return import_module(f"{__name__}.{name}")
    return getattr(import_module(_modules[name]), name)


def __dir__() -> list[str]:
    return sorted(["__version__", *_public()])
