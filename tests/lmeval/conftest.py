"""Tiny checkpoints that speak the toy language. Nothing here may reach for a network."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", DISABLE_MULTIPROC="1", TOKENIZERS_PARALLELISM="false")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]  # checkpoints.py, tiny.py

from checkpoints import save  # noqa: E402


@pytest.fixture(scope="session")
def griffin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("recurrent_gemma", tmp_path_factory.mktemp("models") / "griffin", chat=True)


@pytest.fixture(scope="session")
def jamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("jamba", tmp_path_factory.mktemp("models") / "jamba")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("models") / "llama")
