"""`make docs`: README's table and pictures from the demo's run, and the log's tables of the zoo from the cards.

    python docs/figures.py runs/demo

Tables are found by how their first line begins and written anew in place. The screenshot needs Chromium.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from needlework import zoo
from needlework.report.model_trials import by_boundary
from needlework.report.reader import load
from needlework.report.spec import FORM_COLORS
from needlework.stats import Estimate
from needlework.training import effects

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
LOG = HERE / "log.md"
CHROMIUM = "/usr/bin/chromium"
MODELS = ("tiny-griffin", "tiny-jamba", "tiny-granite", "tiny-transformer", "tiny-mamba")
CONDITIONS = {
    "none": "untouched",
    "keep_heads(k=2)": "2 of 16 heads per layer, by entropy",
    "ablate_attention()": "no heads",
    "ablate_recurrent()": "no recurrent memory",
}
ABILITIES = ("needles found", "forced choice (chance 25 %)", "facts, cloze (chance 25 %)", "facts, letter (chance 25 %)")
FIGURES = {  # rows of the log's first table -> figures of a card
    "NIAH, 256 tokens, one needle; among 8 others": ("niah_256_1_needle", "niah_256_8_distractors"),
    "NIAH, 512 tokens, one needle; among 8 others": ("niah_512_1_needle", "niah_512_8_distractors"),
    "read twice; question first (3 others)": ("niah_256_3_distractors_jrt", "niah_256_3_distractors_question_first"),
    "facts: statement; question": ("cloze_statement", "cloze_question"),
    "facts: letter of four; letter look-up": ("letter_choice", "letter_lookup"),
    "acceptability; entailment; paraphrase": ("acceptability", "entailment", "paraphrase"),
    "16 pairs; phone book of 8; copying 16": ("recall_16_pairs", "phone_book_8", "copy_16"),
}


def row(*cells: str) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    cells = [*head]
    return [row(*cells), "|" + "---|" * len(cells), *(row(*line) for line in rows)]


def percent(value: float, places: int = 1) -> str:
    return f"{100 * value:.{places}f}".removesuffix(".0")


def replace(file: Path, lines: list[str]) -> None:
    """Write a table over the one whose first cell is the same."""
    text = file.read_text(encoding="utf-8").splitlines()
    first = lines[0].split("|")[1]
    start = next(i for i, line in enumerate(text) if line.startswith(f"|{first}|"))
    end = next(i for i in range(start, len(text) + 1) if i == len(text) or not text[i].startswith("|"))
    file.write_text("\n".join([*text[:start], *lines, *text[end:]]) + "\n", encoding="utf-8")


def demo_table(run: Path) -> list[str]:
    """The numbers of the report: of what the plan asks for, by the kind of task, every trial once."""
    frame, lines = load([run]), []
    for model in MODELS:
        trials = by_boundary(frame, model)[0]
        for text, label in CONDITIONS.items():
            needles = [trials.retrieval(text, mode) for mode in ("generate", "choices")]
            shares = [trials.accuracy(rows) for rows in (*needles, *(trials.knowledge(text, form) for form in FORM_COLORS))]
            if any(share.n for share in shares):
                lines.append([model if text == "none" else "", label, *map(cell, shares)])
    return table(["model", "condition", *ABILITIES], lines)


def cell(share: Estimate) -> str:
    return f"{percent(share.value)} % [{percent(share.low)}, {percent(share.high)}]" if share.n else ""


def cards() -> list[dict[str, Any]]:
    entries = zoo.catalog()
    order = ("tiny-griffin", "tiny-griffin-small", *MODELS[1:])
    return [entries[name].record for name in order]


def figures_table(records: list[dict[str, Any]]) -> list[str]:
    rows = [
        [
            "recipe; steps; minutes on one core",
            *(f"{r['recipe_hash']}; {r['steps']:,}; {r['train_minutes']:.0f}" for r in records),
        ],
        ["parameters", *(f"{r['parameters'] / 1e6:.2f} M" for r in records)],
    ]
    for label, names in FIGURES.items():
        rows.append([label, *("; ".join(percent(r["figures"][name]["value"]) for name in names) for r in records)])
    return table(["% right, n = 1,000", *(r["name"] for r in records)], rows)


def effects_table(records: list[dict[str, Any]]) -> list[str]:
    def cell(record: dict[str, Any], act: str) -> str:
        effect = record["effects"].get(act)
        if effect is None:
            return "-"
        shown = [effect["niah"], effect["cloze"]]
        return "; ".join(f"{percent(f['value'])} [{percent(f['low'], 0)}, {percent(f['high'], 0)}]" for f in shown)

    head = ["needles among 3 others (n = 200); facts, top-1 (n = 180)", *(r["name"] for r in records)]
    return table(head, [[label, *(cell(r, act) for r in records)] for act, label in effects.CONDITIONS.items()])


def screenshot(page: Path, picture: Path) -> None:
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        view = browser.new_page(viewport={"width": 1000, "height": 1240})
        view.goto(page.absolute().as_uri())
        view.screenshot(path=str(picture))
        browser.close()


def main(run: Path) -> None:
    replace(README, demo_table(run))
    replace(LOG, figures_table(cards()))
    replace(LOG, effects_table(cards()))
    shutil.copy(run / "figures" / "heads.png", HERE / "head-sweep.png")
    screenshot(run / "report.html", HERE / "report.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
