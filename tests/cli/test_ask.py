"""`needlework ask`: it starts without what it does not need, names unknown words, and ends where the answer ends."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import needlework as nw
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


PROMPT = "the secret code of loran is 4 7 1 . question : what is the secret code of loran ? answer :"
LOADED = """
import json, sys
from typer.testing import CliRunner
import needlework as nw
from needlework.cli import app
from needlework.model import quick_import
short = []

def watched(*args, **options):
    short.append("torch._dynamo" in sys.modules and not hasattr(sys.modules["torch._dynamo"], "__file__"))
    return nw.__getattr__("load")(*args, **options)  # imports the model code, so not before

nw.load = watched
if sys.argv[2:]:
    quick_import._unchanged = None  # so that the short way fails
acts = ["--intervene", "none", "--intervene", "ablate_attention()"]
shown = CliRunner().invoke(app, ["ask", sys.argv[1], PROMPT, *acts, "--json"])
assert shown.exit_code == 0, shown.output
print(json.dumps([short[-1], [answer["text"] for answer in json.loads(shown.stdout)]]))
""".replace("PROMPT", repr(PROMPT))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["short", "usual"])
@pytest.mark.parametrize("model", ["tiny-griffin", "tiny-jamba", "tiny-granite"])
def test_either_way_of_loading_gives_the_answers_of_load(model: str, way: str) -> None:
    words = [sys.executable, "-c", LOADED, model, *(["fail"] if way == "usual" else [])]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    short, texts = json.loads(done.stdout.splitlines()[-1])
    assert short == (way == "short")
    subject = nw.load(model, kernels="stock")
    for intervention, text in zip(("none", "ablate_attention()"), texts, strict=True):
        answer = subject.generate([PROMPT], intervention)[0].text
        assert text
        assert answer.startswith(text), "ask ends at the full stop"


def test_unknown_words_are_named_and_the_answer_of_a_zoo_model_ends_at_the_full_stop() -> None:
    shown = CliRunner().invoke(app, ["ask", "tiny-griffin-small", "Hello world, the code of", "--json"])
    assert shown.exit_code == 0, shown.output
    assert "tiny-griffin-small does not know 'Hello', 'world'" in " ".join(shown.stderr.split())
    assert "smollm2-135m" in shown.stderr
    (answer,) = json.loads(shown.stdout)
    assert answer["finish"] == "length" or answer["text"].endswith(".")
    assert "." not in answer["text"][:-1]
