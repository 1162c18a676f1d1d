"""What the short convolution of a layer carries to retrieval, from pairs of tokens that are blocked in it (docs/recurrent.md).

python docs/convolution.py tiny-griffin tiny-jamba tiny-granite --out docs/recurrent
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import needlework as nw
from needlework.measure import make_samples
from needlework.stats import bootstrap_mean, wilson
from needlework.tables import Table
from needlework.tasks.base import Item, make_task
from needlework.tasks.prompts import token_ids

DEPTHS = (0, 11, 22, 33, 44, 56, 67, 78, 89, 100)
LAGS = (1, 2, 3)
NEEDLE = ("the", "secret", "code", "of", "NAME", "is", "value 1", "value 2", "value 3", ".")  # "is" precedes the value
QUESTION = ("NAME?", "?", "answer", ":")  # the end of the prompt
ANSWER = ("answer 1", "answer 2")  # tokens of the answer that are read; the third is only predicted
Pairs = set[tuple[int, int]]  # (source, query) of the convolution


class Case:
    """One needle with its answer: the tokens that are read, and the place of each role."""

    def __init__(self, subject: nw.Subject, item: Item) -> None:
        self.answer = token_ids(subject.tokenizer, item.target)
        self.tokens = (*item.prompt, *self.answer[:-1])
        (start, _), end = item.spans["value"][0], len(item.prompt)
        self.first, self.end = item.spans["needle"][0][0], end
        self.place = {name: start - 6 + i for i, name in enumerate(NEEDLE)}
        self.place |= {name: end - len(QUESTION) + i for i, name in enumerate(QUESTION)}
        self.place |= {name: end + i for i, name in enumerate(ANSWER)}
        assert self.tokens[self.place["NAME"]] == self.tokens[self.place["NAME?"]], "another wording"

    def pairs(self, query: str, lags: Iterable[int] = LAGS) -> Pairs:
        at = self.place[query]
        return {(at - lag, at) for lag in lags if at >= lag}

    def every(self, lags: Iterable[int] = LAGS) -> Pairs:
        return {(i - lag, i) for i in range(len(self.tokens)) for lag in lags if i >= lag}

    def elsewhere(self, like: Pairs, draw: int) -> Pairs:
        """As many pairs with the same lags, whose queries lie outside of needle, question's end and answer."""
        own = set(range(self.first, self.place["."] + 1)) | set(range(self.place["NAME?"], len(self.tokens)))
        free = [i for i in range(max(LAGS), len(self.tokens)) if i not in own]
        dice, found = random.Random(f"{self.tokens} {draw}"), Pairs()
        for lag in sorted(i - j for j, i in like):
            left = [i for i in free if (i - lag, i) not in found]
            found |= {(i - lag, i) for i in dice.sample(left, 1)} if left else set()
        return found


def links(case: Case) -> dict[str, Pairs]:
    """Named sets of pairs; the number is how far back the source lies."""

    def into(*queries: str, lags: Sequence[int] = LAGS) -> Pairs:
        return set().union(*(case.pairs(query, lags) for query in queries))

    value, end = ("value 1", "value 2", "value 3"), ("?", "answer", ":", *ANSWER)
    return {
        "NAME to is, is to value 1, value token to the next": into("is", *value, lags=[1]),
        "NAME? to ?, to answer, to :, answer token to the next": into(*end, lags=[1]),
        "both chains": into("is", *value, *end, lags=[1]),
        "all into the value": into(*value),
        "all into the value, : and the answer": into(*value, ":", *ANSWER),
    }


def blocked(pairs: Pairs, layer: int) -> nw.Intervention:
    """Return the intervention that blocks these pairs of the layer's convolution."""
    act = nw.NONE
    for query in sorted({i for _, i in pairs}):
        sources = tuple(sorted(j for j, i in pairs if i == query))
        act = act + nw.BlockRecurrent(to=sources, site="conv", layers=[layer], **{"from": (query,)})  # type: ignore[arg-type]
    return act


def measure(subject: nw.Subject, case: Case, act: nw.Intervention) -> tuple[bool, float]:
    """Return whether greedy decoding gives the whole answer, and its log-likelihood."""
    logits = subject.logits([case.tokens], act)[0, case.end - 1 :]
    log_p = logits.log_softmax(-1)[range(len(case.answer)), list(case.answer)]
    return logits.argmax(-1).tolist() == list(case.answer), float(log_p.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    for name, default in (("needles", 40), ("length", 64), ("distractors", 3), ("layer", 1), ("seed", 202), ("draws", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sets-only", action="store_true", help="no random pairs, no single pairs and no figure")
    parser.add_argument("--out", type=Path, help="directory for convolution.json and convolution.png")
    asked = parser.parse_args()
    found = {name: study(nw.load(name), asked) for name in asked.models}
    for name, rows in found.items():
        columns = ["blocked", "pairs", "needles, %", "low", "high", "nats lost", "low ", "high "]
        print(
            Table(
                columns, [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in row] for row in rows["rows"]], name
            ).to_text()
        )
    if asked.out and not asked.sets_only:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "convolution.json").write_text(json.dumps(found) + "\n")
        draw(found).savefig(asked.out / "convolution.png", dpi=150)


def study(subject: nw.Subject, asked: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of the table, and the loss by query and lag."""
    task = {
        "kind": "niah",
        "relation": "code",
        "distractors": asked.distractors,
        "lengths": [asked.length],
        "depths": list(DEPTHS),
    }
    samples = make_samples(subject, make_task({**task, "samples": asked.needles // len(DEPTHS)}), asked.seed)
    cases = [Case(subject, sample.item) for sample in samples]
    clusters = [sample.item.cluster for sample in samples]
    untouched = [measure(subject, case, nw.NONE) for case in cases]
    rows: list[list[Any]] = []

    def ask(label: str, chosen: Callable[[Case], Pairs | nw.Intervention]) -> float:
        """Measure all cases, add a row and return the mean loss in nats."""
        acts = [chosen(case) for case in cases]
        count = round(float(np.mean([len(x) for x in acts if isinstance(x, set)] or [0])))
        made = [blocked(x, asked.layer) if isinstance(x, set) else x for x in acts]
        after = [measure(subject, case, act) for case, act in zip(cases, made, strict=True)]
        lost = bootstrap_mean(np.array([a[1] - b[1] for a, b in zip(untouched, after, strict=True)]), clusters)
        right = wilson(sum(x[0] for x in after), len(after))
        shares = [100 * x for x in (right.value, right.low, right.high)]
        rows.append([label, count, *shares, lost.value, lost.low, lost.high])
        return lost.value

    ask("nothing", lambda case: Pairs())
    ask("the whole convolution", lambda case: nw.AblateRecurrent(site="conv", layers=[asked.layer]))
    for lag in LAGS:
        ask(f"lag {lag}, at all tokens", lambda case, lag=lag: case.every([lag]))
    for label in links(cases[0]):
        ask(label, lambda case, label=label: links(case)[label])
        ask(f"all but: {label}", lambda case, label=label: case.every() - links(case)[label])
        for draw in range(0 if asked.sets_only else asked.draws):
            ask(f"as many at random ({draw})", lambda case, label=label, draw=draw: case.elsewhere(links(case)[label], draw))
    queries = [] if asked.sets_only else [*NEEDLE, *QUESTION, *ANSWER]
    grid = [
        [ask(f"{query} from {lag} back", lambda case, q=query, x=lag: case.pairs(q, [x])) for lag in LAGS] for query in queries
    ]
    return {"rows": _pooled(rows, len(cases)), "queries": queries, "grid": grid, "n": len(cases)}


def _pooled(rows: Sequence[list[Any]], n: int) -> list[list[Any]]:
    """Replace the rows of random draws by one, of all draws together: means, and the range of the draws' nats."""
    pooled: list[list[Any]] = []
    for row in rows:
        if not row[0].startswith("as many"):
            pooled.append(row)
            continue
        if row[0].endswith("(0)"):
            pooled.append(["as many at random", []])
        pooled[-1][1].append(row)
    for i, row in enumerate(pooled):
        if row[0] == "as many at random":
            draws = row[1]
            right = wilson(round(sum(x[2] for x in draws) * n / 100), n * len(draws))
            nats = [x[5] for x in draws]
            shares = [100 * x for x in (right.value, right.low, right.high)]
            pooled[i] = [row[0], draws[0][1], *shares, float(np.mean(nats)), min(nats), max(nats)]
    return pooled


def draw(found: dict[str, dict[str, Any]]) -> Any:
    """Draw the loss by query and lag as a heat map for each model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.6 * len(found) + 1.4, 4.6), layout="constrained")
    most = max(max(map(max, rows["grid"])) for rows in found.values())
    axes = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
    for ax, (name, rows) in zip(axes, found.items(), strict=True):
        image = ax.imshow(rows["grid"], cmap="Blues", vmin=0, vmax=most, aspect="auto")
        for (y, x), value in np.ndenumerate(np.array(rows["grid"])):
            shown = f"{value:.1f}" if abs(value) >= 0.05 else ""
            ax.text(x, y, shown, ha="center", va="center", fontsize=7, color="white" if value > most / 2 else "black")
        ax.set_xticks(range(len(LAGS)), [f"{lag} back" for lag in LAGS], fontsize=8)
        ax.set_yticks(range(len(rows["queries"])), rows["queries"], fontsize=8)
        ax.set_title(f"{name}, n = {rows['n']}", fontsize=9)
    axes[0].set_ylabel("token whose convolution loses a source")
    figure.colorbar(image, ax=axes, shrink=0.6, label="nats of the answer lost")
    return figure


if __name__ == "__main__":
    main()
