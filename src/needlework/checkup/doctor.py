"""`nw.doctor(subject)`: every law tried on one model; whatever goes wrong in a law is that law's failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime

from needlework.checkup.case import Case, DoesNotApply, Finding
from needlework.checkup.findings import Check, Checkup, Outcome
from needlework.checkup.laws import LAWS
from needlework.checkup.spans import chat_spans, plain_spans, sample
from needlework.subject import Subject

TOKENS, QUICK_TOKENS = 32, 16  # of the prompts that laws are tried on; a window's edge may need longer ones
AFTER, QUICK_AFTER = 4, 2  # tokens that follow them
MOST_TOKENS, QUICK_MOST_TOKENS = 4096, 256
_SPANS: dict[str, tuple[str, Callable[[Case], Finding]]] = {
    "spans": ("a needle's span is the needle, token by token", plain_spans),
    "chat spans": ("so it is inside the chat template", chat_spans),
}
ALL_LAWS = {**LAWS, **_SPANS}


def doctor(subject: Subject, *, quick: bool = False, most_tokens: int | None = None, progress: bool = False) -> Checkup:
    """Try on this model the laws that every number rests on; the table of what holds, what fails, and what does not apply.

    `most_tokens` is the longest prompt that is read (4,096): a window's edge that lies beyond is not looked at. `quick` reads
    short prompts only, as `nw.run` does for the record. The model is as it was afterwards, also where a law fails.
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
        for law, (says, check) in ALL_LAWS.items():
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
    except Exception as error:  # a model that cannot do this cannot be trusted to have done it
        words = (str(error) or type(error).__name__).splitlines()[0]
        return Check(law, says, "fail", words, seconds=time.perf_counter() - start)
    outcome: Outcome = "pass" if found.holds else "fail"
    return Check(law, says, outcome, found.why, found.measured, found.allowed, time.perf_counter() - start, found.shown)


def _text(subject: Subject) -> tuple[int, ...]:
    """Tokens of real text, where the tokenizer has any; what is wrong with it is for the law of spans to say."""
    with suppress(Exception):
        ids = sample(subject.tokenizer, chat=False).prompt
        if max(ids) < subject.anatomy.vocabulary:
            return ids
    return ()


@contextmanager
def _told(progress: bool) -> Iterator[Callable[[str], None]]:
    """Something that is called with the name of each law before it is tried."""
    if not progress:
        yield lambda law: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(ALL_LAWS), completed=-1)
        yield lambda law: bar.update(task, description=law, advance=1)
