"""Evaluation of general ability with lm-evaluation-harness. lm-eval is imported late because that takes seconds."""

from importlib.util import find_spec

from needlework.errors import NeedleworkError


def require_lm_eval() -> None:
    """Raise NeedleworkError if lm-eval is not installed."""
    if find_spec("lm_eval") is None:
        raise NeedleworkError("this needs lm-evaluation-harness: pip install 'needlework[lm-eval]'")
