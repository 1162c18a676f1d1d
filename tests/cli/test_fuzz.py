"""Bad input by the thousand, from a fixed seed: plans, intervention texts, rankings, haystacks, prompt files, configurations.

Whatever comes in is either taken or refused with a NeedleworkError: no other error, no hang, no blow-up.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import needlework as nw
from needlework import zoo
from needlework.experiments.models import DiskModels
from needlework.experiments.plan import Model, load, plan_files
from needlework.heads import foreign
from needlework.interventions.base import check_ranges, expand
from needlework.model.load import blueprint
from needlework.tasks import haystack, make_task

SEED = 17
INPUTS = 10_000
DIRECTORIES = 200
SECONDS_EACH = 30  # far beyond what any of them takes, on a machine however busy
MEMORY = 3 * 2**30  # more than the process has when it begins

WORDS = [
    "none",
    "keep_heads",
    "ablate_heads",
    "only_heads",
    "ablate_attention",
    "ablate_recurrent",
    "reset_state",
    "swap_memory",
    "expose_tokens\nlimit_context",
    "ranking",
    "k",
    "fraction",
    "by",
    "layers",
    "heads",
    "phase",
    "half",
    "from",
    "span",
    "mode",
    "tokens",
    "sinks",
    "seed",
    "at",
    "site",
    "'entropy'",
    "'random'",
    "'needle'\n'kv'",
    "'decode'",
    "'both'",
    "'2.0",
    "5.1'",
    "H",
    "0..H",
    "0..4",
    "1..9..2",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    ",",
    "=",
    "+",
    "-",
    "*",
    "**",
    ".",
    "..",
    "...",
    ":",
    ";",
    "'",
    '"',
    "\\",
    "#",
    "@",
    "~",
    "0",
    "1",
    "2",
    "-1",
    "1.5",
    "1e999",
    "nan",
    "True",
    "None\n999999999999999999999999",
    "0x1f",
    "1_000",
    "1j",
    "b'x'",
    "f'{x}'",
    "lambda:",
    "x:=1",
    "�",
    "\x00",
    "\x1b[31m",
    "\u202e",
    "\u200f",
    "é",
    "💥",
    "\n",
    "\t",
]
SNIPPETS = [
    b"",
    b"\x00",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    "\u202e\u2066\u200f".encode(),
    b"\x1b]0;x\x07",
    b"[" * 300,
    b"{" * 300,
    b"&a [*a]",
    b"!!python/object:os.system x",
    b"!!timestamp x",
    b"!!int ''",
    b"!!binary x",
    b"- - - -",
    b"9" * 40,
    b"1e400",
    b".nan",
    b"~",
    b"'",
    b'"',
    b"\\ud800",
    b"x" * 5000,
    b"1000000000",
    b"-1",
    b"0..999999",
    b"../../etc/passwd",
    b"\r\n",
    b"\t",
    b": ",
    b"# ",
    b"%",
    b"@",
    b"NaN",
    b"null",
]


@pytest.fixture(autouse=True)
def _bounds() -> Iterator[None]:
    """An input that hangs or takes much memory fails its test by name, not the machine."""

    def hang(*_: Any) -> None:
        raise TimeoutError("an input takes too long")

    before, limits = signal.signal(signal.SIGALRM, hang), resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, limits[1]))
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    resource.setrlimit(resource.RLIMIT_AS, limits)


def tried(read: Callable[[Any], object], given: Any) -> bool:
    """Whether it was taken; anything but a NeedleworkError fails the test with the input that did it."""
    signal.alarm(SECONDS_EACH)
    try:
        read(given)
        return True
    except nw.NeedleworkError as error:
        told = len(str(error))
    except BaseException as error:
        raise AssertionError(f"{type(error).__name__}: {error} for {given!r:.2000}") from error
    finally:
        signal.alarm(0)
    assert 0 < told < 20_000, f"an error says what is wrong, and not all of it: {told} characters"
    return False


def mutated(rng: random.Random, data: bytes) -> bytes:
    """A file with a few things changed, doubled, cut out or put in."""
    for _ in range(rng.randint(1, 4)):
        at, size = rng.randrange(len(data) + 1), rng.randint(0, 30)
        how = rng.randrange(5)
        if how == 0:
            data = data[:at] + rng.choice(SNIPPETS) + data[at:]
        elif how == 1:
            data = data[:at] + data[at + size :]
        elif how == 2:
            data = data[:at] + rng.choice(SNIPPETS) + data[at + size :]
        elif how == 3:
            data = data[:at] + bytes(rng.randrange(256) for _ in range(rng.randint(1, 4))) + data[at:]
        else:
            data = data[:at] + data[at : at + size] * rng.randint(2, 50) + data[at + size :]
    return data


def texts(rng: random.Random, count: int) -> Iterator[str]:
    """Intervention texts: words in any order, and right ones with something wrong in them."""
    right = [
        "keep_heads(k=0..H, phase={'prefill', 'decode'})",
        "ablate_heads(heads=[[2, 0], [5, 1]])",
        "none + ablate_attention()",
    ]
    right += [
        "keep_heads(k=2, by=ranking('2.0 2.1'))",
        "swap_memory(half='kv', from='twin')",
        "expose_tokens(mode='only', span=[1, 2])",
    ]
    for _ in range(count):
        if rng.random() < 0.5:
            yield rng.choice(("", " ")).join(rng.choices(WORDS, k=rng.randint(1, 14)))
        else:
            yield mutated(rng, rng.choice(right).encode()).decode("utf-8", "surrogateescape")


@pytest.mark.slow
def test_ten_thousand_inputs_to_the_parsers(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    taken = {"texts": 0, "rankings": 0, "ranking files": 0, "plans": 0, "haystacks": 0, "prompts": 0}
    for text in texts(rng, INPUTS * 6 // 10):
        read = rng.choice((nw.parse, check_ranges, lambda text: expand(text, {"H": 4})))
        taken["texts"] += tried(read, text)
    for _ in range(INPUTS // 10):
        words = " ".join(rng.choices(["1.2", "2.0", "5.11", "-1.3", "x", "1.2.3", "1", ".", "9" * 30 + ".1", "é", "\ud800"], k=3))
        taken["rankings"] += tried(nw.Ranking.parse, words)
        order: Any = rng.choices([(1, 2), [2, 0], (3,), "ab", 5, None, (1.5, 2), (10**30, 0), [[1], 2], {}], k=rng.randint(0, 3))
        tried(lambda order: nw.Ranking(order=order), order)
    ranking_files(random.Random(SEED), tmp_path, taken)  # of its own, so that the other inputs stay what they were
    plans = [path.read_bytes() for path in plan_files()]
    for _ in range(INPUTS // 10):
        (tmp_path / "plan.yaml").write_bytes(mutated(rng, rng.choice(plans)[: rng.randint(100, 700)]))
        taken["plans"] += tried(load, tmp_path / "plan.yaml")
    prose = "The sun rose. “Who is there?” he said! Nobody answered... and so on.\n\n".encode() * 5
    for i in range(INPUTS // 10):
        (tmp_path / f"hay{i}.txt").write_bytes(rng.choice(SNIPPETS) if rng.random() < 0.1 else mutated(rng, prose))
        taken["haystacks"] += tried(haystack.read_sentences, str(tmp_path / f"hay{i}.txt"))
    line = json.dumps(
        {"prompt": "the code of loran is 4 7 1 .", "target": "4 7 1", "needle": "4 7 1", "options": ["4 7 1", "1 2 3"]}
    )
    for _ in range(INPUTS // 10):
        (tmp_path / "own.jsonl").write_bytes(mutated(rng, f"{line}\n{line}\n".encode()))
        taken["prompts"] += tried(lambda file: make_task({"kind": "prompts", "file": str(file)}).check(), tmp_path / "own.jsonl")
    assert all(taken.values()), f"some of each kind are right: {taken}"


def ranking_files(rng: random.Random, folder: Path, taken: dict[str, int]) -> None:
    """Our own files, Wu's and DuoAttention's, each with something wrong in it."""
    anatomy = blueprint(zoo.path("tiny-jamba")).anatomy
    scores = {head: i / 7 for i, head in enumerate(anatomy.heads)}
    mine = nw.Ranking.by_scores(scores, method="m", samples=3, evidence={"a": [1, {"b": None}]})
    mine.save(folder / "ours.json")
    for kind, name in (("wu", "wu.json"), ("duo", "gates.tsv")):
        foreign.write(mine, folder / name, kind, anatomy)
    right = [(folder / name).read_bytes() for name in ("ours.json", "wu.json", "gates.tsv")]
    for i in range(INPUTS // 10):
        file = folder / ("some.tsv" if i % 3 == 2 else "some.json")
        if rng.random() < 0.3 and i % 3 < 2:
            file.write_text(json.dumps(configured(rng, json.loads(right[i % 3]))))
        else:
            file.write_bytes(mutated(rng, right[i % 3]))
        taken["ranking files"] += tried(lambda file: foreign.read(file, anatomy), file)
        tried(nw.Ranking.load, file)


@pytest.mark.slow
def test_a_line_of_fifty_megabytes_is_no_trouble(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("word " * 10_000_000)
    assert tried(haystack.read_sentences, str(tmp_path / "long.txt"))


VALUES = [
    None,
    0,
    -1,
    1,
    3,
    7,
    10**9,
    10**30,
    1.5,
    float("nan"),
    "x",
    "",
    [],
    [1],
    {},
    {"a": 1},
    True,
    False,
    "../x",
    "\ud800",
    "9" * 500,
]


def configured(rng: random.Random, content: Any) -> Any:
    """A configuration with one to three of its values changed, taken out or doubled."""
    if not isinstance(content, dict) or rng.random() < 0.05:
        return rng.choice(VALUES)
    content = dict(content)
    for key in rng.sample(sorted(content), k=min(len(content), rng.randint(1, 3))):
        if rng.random() < 0.15:
            del content[key]
        else:
            content[key] = configured(rng, content[key]) if isinstance(content[key], dict) else rng.choice(VALUES)
    return content


@pytest.mark.slow
def test_two_hundred_model_directories(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    loaded = 0
    for i in range(DIRECTORIES):
        source = zoo.path(rng.choice(["tiny-griffin-small"] * 4 + ["tiny-jamba"]))
        folder = tmp_path / str(i)
        folder.mkdir()
        for file in source.glob("*.json"):
            shutil.copy(file, folder)
        (folder / "model.safetensors").symlink_to(source / "model.safetensors")
        file = folder / rng.choice(["config.json"] * 4 + ["tokenizer_config.json", "generation_config.json", "tokenizer.json"])
        if rng.random() < 0.3:
            file.write_bytes(mutated(rng, file.read_bytes()))
        else:
            file.write_text(json.dumps(configured(rng, json.loads(file.read_text()))))
        if rng.random() < 0.1:
            head = (source / "model.safetensors").read_bytes()[: rng.choice([0, 8, 100, 100_000])]
            (folder / "model.safetensors").unlink()
            (folder / "model.safetensors").write_bytes(head)
        if file.name == "config.json" and i % 8:
            loaded += tried(blueprint, folder)
        elif i % 8:
            loaded += tried(lambda folder: DiskModels().inspect(Model("plan:1", "m", str(folder))), folder)
        else:
            loaded += tried(nw.load, folder)
    assert loaded, "some of them are models still"
