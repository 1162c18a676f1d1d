"""Packages that are not ours and serve as witnesses. A missing witness is a failure, unless the environment waives it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator

import pytest
import torch

WAIVE = "NEEDLEWORK_SKIP_PARITY"
INSTALL = {
    # DeepMind pins numpy < 2.4 and pulls in jax; its torch part needs neither.
    "recurrentgemma": "pip install 'jaxtyping<1' 'typeguard<3' einops && pip install --no-deps recurrentgemma==1.0.1",
    "nnsight": "pip install nnsight==0.8.1",
}


@pytest.fixture(scope="session")
def witness() -> Callable[[str], None]:
    """Call with a package's name: passes if it is installed, else fails, or skips if the environment says so."""

    def require(package: str) -> None:
        if importlib.util.find_spec(package) is not None:
            return
        if os.environ.get(WAIVE):
            pytest.skip(f"{package} is not installed and {WAIVE} is set")
        pytest.fail(
            f"{package} is not installed, so nothing checks needlework against it. `make setup` installs it, or:\n"
            f"  {INSTALL[package]}\nSet {WAIVE}=1 to go without."
        )

    return require


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    """Models this small gain nothing from threads, and lose tenfold where other work keeps the cores busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
