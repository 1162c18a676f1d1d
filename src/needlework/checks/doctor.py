"""`nw.doctor(subject)`: check every law on one model. An exception inside a law is a failure of that law."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime

from needlework.checks.case import Case, DoesNotApply, Finding
from needlework.checks.findings import Check, Checkup, Outcome
from needlework.checks.laws import LAWS, sample
from needlework.subject import Subject

TOKENS, QUICK_TOKENS = 32, 16  # length of test prompts; the window law may need longer ones
AFTER, QUICK_AFTER = 4, 2  # tokens after the prompt
MOST_TOKENS, QUICK_MOST_TOKENS = 4096, 256


def doctor(subject: Subject, *, quick: bool = False, most_tokens: int | None = None, progress: bool = False) -> Checkup:
    """Check the laws that all measurements rely on; return which hold, which fail and which do not apply.

    The model is left unchanged, also if a law fails.

    Args:
        quick: Use short prompts only, as `nw.run` does by default.
        most_tokens: Longest prompt (default 4,096, quick 256); sliding windows that end beyond it are not checked.
        progress: Show a progress bar.
    """
    import torch
    import transformers

    from needlework import __version__

    longest = most_tokens or (QUICK_MOST_TOKENS if quick else MOST_TOKENS)
    tokens, after = (QUICK_TOKENS, QUICK_AFTER) if quick else (TOKENS, AFTER)
    if subject.anatomy.max_tokens is not None:
        longest = min(longest, subject.anatomy.max_tokens - 2 * AFTER)
    case = Case(subject, min(tokens, longest), after, longest, _text(subject))
    checks = []
    with _told(progress) as tell:
        for law, (says, check) in LAWS.items():
            tell(law)
            checks.append(_tried(case, law, says, check))
    versions = {
        "needlework": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": str(subject.body.device),
        "dtype": str(subject.model.dtype).removeprefix("torch."),
        "kernels": subject.body.kernels,
    }
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Checkup(subject.anatomy.architecture, tuple(checks), versions, now, quick)


def _tried(case: Case, law: str, says: str, check: Callable[[Case], Finding]) -> Check:
    start = time.perf_counter()
    try:
        found = check(case)
    except DoesNotApply as reason:
        return Check(law, says, "does not apply", str(reason), seconds=time.perf_counter() - start)
    except Exception as error:  # a law that raises is not shown to hold
        words = (str(error) or type(error).__name__).splitlines()[0]
        return Check(law, says, "fail", words, seconds=time.perf_counter() - start)
    outcome: Outcome = "pass" if found.holds else "fail"
    return Check(law, says, outcome, found.why, found.measured, found.allowed, time.perf_counter() - start, found.shown)


def _text(subject: Subject) -> tuple[int, ...]:
    """Return tokens of real text, or none if the tokenizer fails, which the law of spans reports."""
    with suppress(Exception):
        ids = sample(subject.tokenizer, chat=False).prompt
        if max(ids) < subject.anatomy.vocabulary:
            return ids
    return ()


@contextmanager
def _told(progress: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows progress, to be called with the name of each law before it is checked."""
    if not progress:
        yield lambda law: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(LAWS), completed=-1)
        yield lambda law: bar.update(task, description=law, advance=1)
