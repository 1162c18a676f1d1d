"""Loading and asking say nothing that does not hold, and transformers can say it again afterwards."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import transformers
from huggingface_hub.utils import logging as hub_logging

import cases
import needlework as nw
from needlework.model.hooked_model import withheld

HINT = "is falling back to its reference"


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What transformers logs at its own verbosity, as in a fresh process: it says each thing once."""
    messages: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    log, listener, before = logging.getLogger("transformers"), Listener(), transformers.logging.get_verbosity()
    log.addHandler(listener)
    transformers.logging.set_verbosity_warning()
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    yield messages
    log.removeHandler(listener)
    transformers.logging.set_verbosity(before)


def _state(name: str) -> tuple[int, list[Any]]:
    log = logging.getLogger(name)
    return log.level, list(log.filters)


@pytest.mark.parametrize("name", ["jamba", "mamba", "granitemoehybrid"])
def test_no_hint_at_libraries_for_gpus(name: str, said: list[str]) -> None:
    loggers = ("transformers.integrations.hub_kernels", "transformers.modeling_utils", "transformers")
    before = [_state(logger) for logger in loggers]
    model = cases.build(name)
    said.clear()
    subject = nw.wrap(model)
    subject.generate([[5, 6, 7, 8]], max_new_tokens=3)
    assert [text for text in said if HINT in text] == []
    assert [_state(logger) for logger in loggers] == before
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    model(input_ids=cases.tokens(1, 4))
    assert any(HINT in text for text in said), "outside of needlework transformers speaks as before"


@pytest.mark.slow  # the hub is tried again for a while
def test_the_hub_is_as_loud_as_before() -> None:
    before = hub_logging.get_verbosity()  # type: ignore[no-untyped-call]
    hub_logging.set_verbosity_info()  # type: ignore[no-untyped-call]
    try:
        with pytest.raises(nw.NeedleworkError, match="hub"):
            nw.load("nobody/nothing-of-this-name")
        assert hub_logging.get_verbosity() == logging.INFO  # type: ignore[no-untyped-call]
    finally:
        hub_logging.set_verbosity(before)  # type: ignore[no-untyped-call]


def test_only_the_named_message_is_withheld_and_it_is_kept(said: list[str]) -> None:
    log = logging.getLogger("transformers.modeling_utils")
    with withheld(log.name, "LOAD REPORT") as kept:
        log.warning("a LOAD REPORT of tensors")
        log.warning("something else")
    log.warning("a LOAD REPORT afterwards")
    assert kept == ["a LOAD REPORT of tensors"]
    assert said == ["something else", "a LOAD REPORT afterwards"]
    transformers.logging.set_verbosity_error()
    with withheld(log.name, "LOAD REPORT") as kept:
        log.warning("a LOAD REPORT that nobody would have seen")
        log.warning("something that nobody would have seen")
        log.error("an error")
    assert kept == ["a LOAD REPORT that nobody would have seen"]
    assert said[2:] == ["an error"]
    assert log.level == logging.NOTSET


def test_few_weights_are_read_without_a_bar(capfd: pytest.CaptureFixture[str]) -> None:
    assert transformers.logging.is_progress_bar_enabled()
    nw.load("tiny-griffin-small")
    assert "Loading weights" not in capfd.readouterr().err
    assert transformers.logging.is_progress_bar_enabled(), "and transformers shows its own as before"
