"""`make docs`: README's picture, table and sentences from the full demo's run, and the log's tables of the zoo from the cards.

    python docs/figures.py runs/demo-full

What stands between `<!-- name -->` and `<!-- end of name -->` is written anew, and so is a table that begins alike. How many
of a study's models show the effect is read from docs/study.json ({"shown": 5, "total": 12}), once there is one.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from needlework import zoo
from needlework.analysis.frame import Frame
from needlework.analysis.model_trials import ModelTrials, by_boundary
from needlework.analysis.reader import load
from needlework.interventions.acts import RANDOM
from needlework.stats import NOTHING, Estimate
from needlework.tables import Table
from needlework.training import card

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
LOG = HERE / "log.md"
STUDY = HERE / "study.json"
ZOO = ("tiny-griffin", "tiny-griffin-small", "tiny-jamba", "tiny-granite", "tiny-lfm", "tiny-transformer", "tiny-mamba")
NEEDLES = (
    "model",
    "untouched",
    "no heads",
    "no heads, forced choice",
    "few heads, by entropy",
    "as many at random, of untouched",
    "no recurrent memory",
)
ILLUSTRATION = "Models selected for an effect are not evidence for it."
FIGURES = {  # rows of the log's first table -> figures of a card
    "NIAH, 256 tokens, one needle; among 8 others": ("niah_256_1_needle", "niah_256_8_distractors"),
    "NIAH, 512 tokens, one needle; among 8 others": ("niah_512_1_needle", "niah_512_8_distractors"),
    "read twice; question first (3 others)": ("niah_256_3_distractors_jrt", "niah_256_3_distractors_question_first"),
    "facts: statement; question": ("cloze_statement", "cloze_question"),
    "facts: letter of four; letter look-up": ("letter_choice", "letter_lookup"),
    "acceptability; entailment; paraphrase": ("acceptability", "entailment", "paraphrase"),
    "16 pairs; phone book of 8; copying 16": ("recall_16_pairs", "phone_book_8", "copy_16"),
    "two hops (3 others); variables of two chains": ("niah_256_3_distractors_two_hops", "variables_2_chains"),
}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return Table(head, rows).to_markdown().splitlines()


def percent(value: float, places: int = 1) -> str:
    return f"{100 * value:.{places}f}".removesuffix(".0")


def replace(file: Path, lines: list[str]) -> None:
    """Write a table over the one whose first cell is the same."""
    text = file.read_text(encoding="utf-8").splitlines()
    first = lines[0].split("|")[1]
    start = next(i for i, line in enumerate(text) if line.startswith(f"|{first}|"))
    end = next(i for i in range(start, len(text) + 1) if i == len(text) or not text[i].startswith("|"))
    file.write_text("\n".join([*text[:start], *lines, *text[end:]]) + "\n", encoding="utf-8")


def fill(file: Path, name: str, lines: Iterable[str]) -> None:
    """Write these lines between the marks of this name."""
    text = file.read_text(encoding="utf-8")
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{file} has no place {begin.strip()} ... {end}")
    file.write_text(before + begin + "".join(f"{line}\n" for line in lines) + end + after, encoding="utf-8")


def said(frame: Frame) -> str:
    """What the table and the picture stand on."""
    sizes = [n / 1e6 for model in frame.models if (n := frame.anatomy(model).get("parameters"))]
    of = f" of {min(sizes):.1f} to {max(sizes):.1f} million parameters" if sizes else ""
    return f"Needles found ({frame.trials:,} trials of {len(frame.models)} models{of}; 95 % intervals in brackets):"


def demo_table(frame: Frame) -> list[str]:
    """Needles found, as the report has them: of what the plan asks for, by the kind of task, every trial once."""
    return table(NEEDLES, [[model, *_needles(by_boundary(frame, model)[0])] for model in frame.models])


def _needles(trials: ModelTrials) -> list[str]:
    off, few, recurrent = trials.heads_off(), trials.few_heads(), trials.recurrent_off()
    choices = trials.retrieval(off.text, "choices") if off else []
    chance = f", chance {percent(trials.frame.chance(choices))} %" if off and len(choices) else ""
    kept = f", {few.kept(trials.heads)} of {trials.heads}" if few else ""
    return [
        cell(trials.accuracy(trials.retrieval("none"))),
        cell(trials.accuracy(trials.retrieval(off.text))) if off else "",
        cell(trials.accuracy(trials.retrieval(off.text, "choices")), chance) if off else "",
        cell(trials.accuracy(trials.retrieval(few.text)), kept) if few else "",
        cell(trials.retained_by_heads(RANDOM).get(few.kept(trials.heads) or 0, NOTHING)) if few else "",
        cell(trials.accuracy(trials.retrieval(recurrent.text))) if recurrent else "",
    ]


def cell(share: Estimate, more: str = "") -> str:
    return f"{percent(share.value)} % [{percent(share.low)}, {percent(share.high)}]{more}" if share.n else ""


def study(file: Path = STUDY) -> str:
    """How far the models of the demo can stand for others."""
    if not file.exists():
        return ILLUSTRATION
    counts = json.loads(file.read_text(encoding="utf-8"))
    shown, total = counts["shown"], counts["total"]
    of_study = f"Of the {total} models of the study in [docs/log.md](docs/log.md), {shown} show it and {total - shown} do not."
    return f"{ILLUSTRATION} {of_study}"


def cards() -> list[dict[str, Any]]:
    entries = zoo.catalog()
    return [entries[name].record for name in ZOO]


def _figure(record: dict[str, Any], name: str) -> str:
    """A card that is older than a figure does not have it."""
    return percent(record["figures"][name]["value"]) if name in record["figures"] else "-"


def figures_table(records: list[dict[str, Any]]) -> list[str]:
    rows = [
        [
            "recipe; steps; minutes on one core",
            *(f"{r['recipe_hash']}; {r['steps']:,}; {r['train_minutes']:.0f}" for r in records),
        ],
        ["parameters", *(f"{r['parameters'] / 1e6:.2f} M" for r in records)],
    ]
    for label, names in FIGURES.items():
        rows.append([label, *("; ".join(_figure(r, name) for name in names) for r in records)])
    return table(["% right, n = 1,000", *(r["name"] for r in records)], rows)


def effects_table(records: list[dict[str, Any]]) -> list[str]:
    def cell(record: dict[str, Any], act: str) -> str:
        effect = record["effects"].get(act)
        if effect is None:
            return "-"
        shown = [effect["niah"], effect["cloze"]]
        return "; ".join(f"{percent(f['value'])} [{percent(f['low'], 0)}, {percent(f['high'], 0)}]" for f in shown)

    head = ["needles among 3 others (n = 200); facts, top-1 (n = 180)", *(r["name"] for r in records)]
    return table(head, [[label, *(cell(r, act) for r in records)] for act, label in card.CONDITIONS.items()])


def main(run: Path) -> None:
    frame = load([run])
    fill(README, "demo", [said(frame), "", *demo_table(frame)])
    fill(README, "study", [study()])
    replace(LOG, figures_table(cards()))
    replace(LOG, effects_table(cards()))
    shutil.copy(run / "figures" / "finding.png", HERE / "finding.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
