from __future__ import annotations

from typing import Any

import pytest
from token_kinds import KINDS

from needlework.toy import tokenizer


@pytest.fixture(scope="session")
def toy() -> Any:
    """The zoo's own tokenizer."""
    return tokenizer.build()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)
