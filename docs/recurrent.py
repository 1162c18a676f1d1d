"""What retrieval and facts owe to the recurrent side of a toy-language model: the figures and pictures of docs/recurrent.md.

python docs/recurrent.py tiny-jamba --needles 30 --distractors 3 --facts 48 --out docs/recurrent
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import needlework as nw
from needlework.cli.options import show
from needlework.heads.output import draw_recurrent, recurrent_table
from needlework.tasks.base import Item, make_task
from needlework.terminal import Bar

DEPTHS = (0, 11, 22, 33, 44, 56, 67, 78, 89, 100)
SUBJECTS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    for name, default in (("needles", 30), ("distractors", 3), ("length", 128), ("facts", 48), ("seed", 101), ("draws", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--relation", default="code", help="what needles tell: code, badge, hideout or gift")
    parser.add_argument("--out", type=Path, help="directory for NAME.json and NAME.png")
    asked = parser.parse_args()
    subject = nw.load(asked.model)

    def items(**task: object) -> list[Item]:
        anatomy = subject.anatomy
        return list(make_task(task).items(subject.tokenizer, asked.seed, anatomy.window, anatomy.max_tokens))

    grid = {"lengths": [asked.length], "samples": asked.needles // len(DEPTHS), "relation": asked.relation}
    needles = {"kind": "niah", "distractors": asked.distractors, **grid}
    facts = items(kind="cloze", per_subject=asked.facts // SUBJECTS)
    with Bar(100, "%") as bar:
        bar.show(asked.model)
        side = nw.recurrent_side(
            subject,
            items(**needles),
            beside={"facts": facts},
            seed=asked.seed,
            draws=asked.draws,
            progress=lambda share: bar.advance(max(0, int(100 * share) - bar.count)),
        )
    show(recurrent_table(side))
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        draw_recurrent(side, asked.model).savefig(asked.out / f"{asked.model}.png", dpi=150)
        (asked.out / f"{asked.model}.json").write_text(json.dumps(side.to_dict()) + "\n")


if __name__ == "__main__":
    main()
