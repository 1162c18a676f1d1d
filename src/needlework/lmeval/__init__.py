"""General ability through lm-evaluation-harness. Its modules import lm-eval only where it is needed: that takes seconds."""

from importlib.util import find_spec

from needlework.errors import NeedleworkError


def demand_lm_eval() -> None:
    """Refuse, before anything is done, where lm-eval is not installed."""
    if find_spec("lm_eval") is None:
        raise NeedleworkError("this needs lm-evaluation-harness: pip install 'needlework[lm-eval]'")
