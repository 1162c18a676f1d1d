"""`needlework ask`: it starts without what it does not need, names unknown words, and ends where the answer ends."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from needlework.cli import app

START = """
import sys
from typer.testing import CliRunner
from needlework.cli import app
shown = CliRunner().invoke(app, ["ask", "tiny-griffin-small", "Hello world, the code of", "--json", *sys.argv[1:]])
assert shown.exit_code == 0, shown.output
unneeded = ("numba", "torch._dynamo", "sympy", "pandas", "scipy", "matplotlib", "needlework.tasks", "rich.markdown")
print([name for name in unneeded if name in sys.modules])
import torch, torch._dynamo
assert callable(torch._dynamo.optimize), "the compiler is there for whoever wants it afterwards"
"""


@pytest.mark.slow
def test_a_short_prompt_needs_neither_compiled_kernels_nor_torchs_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-jamba", "tiny-granite"])
def test_models_of_other_families_are_loaded_the_short_way_too(model: str) -> None:
    code = START.partition("unneeded")[0].replace("tiny-griffin-small", model)
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


@pytest.mark.slow
def test_a_model_that_needs_more_of_the_compiler_is_loaded_as_usual() -> None:
    code = START.partition("unneeded")[0].replace(
        "shown =", "from needlework.model import quick_import\nquick_import._unchanged = None\nshown ="
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_unknown_words_are_named_and_the_answer_of_a_zoo_model_ends_at_the_full_stop() -> None:
    shown = CliRunner().invoke(app, ["ask", "tiny-griffin-small", "Hello world, the code of", "--json"])
    assert shown.exit_code == 0, shown.output
    assert "tiny-griffin-small does not know 'Hello', 'world'" in " ".join(shown.stderr.split())
    assert "smollm2-135m" in shown.stderr
    (answer,) = json.loads(shown.stdout)
    assert answer["finish"] == "length" or answer["text"].endswith(".")
    assert "." not in answer["text"][:-1]
