"""The result of `nw.run`: rows, verdicts and report of a run. Free of torch."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from needlework.checks import Checkup
from needlework.errors import NeedleworkError
from needlework.results import Store, fingerprint
from needlework.results.export import read_trials
from needlework.tables import Table
from needlework.terminal import display_name

if TYPE_CHECKING:
    import pandas

    from needlework.analysis.verdicts import Verdict


@dataclass(frozen=True)
class Result:
    """A run. Methods read from its store when they are called.

    Attributes:
        directory: Directory of the run.
        sound: Whether no trial of the plan failed, and every `limit_context` hid keys in some trial.
    """

    directory: Path
    sound: bool

    @property
    def fingerprint(self) -> str:
        """Hash of all rows of the plan (see `results.fingerprint`): equal runs have equal hashes."""
        return fingerprint(self.directory)

    def checkups(self) -> dict[str, Checkup]:
        """Return the doctor's results by model name, as recorded when the run loaded the model."""
        with closing(Store(self.directory)) as store:
            about = store.meta("models") or {}
        return {name: Checkup.from_dict(model["checkup"]) for name, model in about.items() if "checkup" in model}

    def rows(self) -> pandas.DataFrame:
        """Return one row per trial of the plan: the columns of the store, and each score as `score_NAME`.

        `needlework explain trials` describes the columns.
        """
        import pandas

        with closing(Store(self.directory)) as store:
            columns, rows = read_trials(store, "asked ORDER BY experiment, model, task, id", json_text=False)
            return pandas.DataFrame(list(rows), columns=columns)

    def frame(self, score: str = "correct") -> pandas.DataFrame:
        """Return the mean of a score with its 95 % interval, one row per model, task and intervention.

        Args:
            score: Name of a score, such as "correct" or "grade"; groups of trials without it are left out.
        """
        import pandas

        from needlework.analysis.reader import load
        from needlework.stats import accuracy, bootstrap_mean

        frame = load([self.directory])
        names = ["model", "task", "text", "mode", "boundary"]
        rows = []
        for key, groups in frame.groups.groupby(names, sort=False).groups.items():
            trials = frame.of_groups(groups)
            values = frame.values(score, trials)
            known = ~np.isnan(values)
            if known.any():
                values, clusters = values[known], frame.column("cluster", trials)[known]
                found = accuracy(values) if set(values) <= {0.0, 1.0} else bootstrap_mean(values, clusters)
                rows.append((*key, found.value, found.low, found.high, found.n))
        rows.sort(key=lambda row: (row[0], row[1], row[2] != "none"))  # the untouched model first
        names[names.index("text")] = "intervention"
        return pandas.DataFrame(rows, columns=[*names, score, "low", "high", "n"])

    def plot(self, ax: Any = None, *, score: str = "correct") -> Any:
        """Draw `frame(score)`: a point with its interval for each task and intervention, and return the matplotlib axes."""
        from needlework.plots import light_colors, new_axes

        frame = self.frame(score)
        if frame.empty:
            raise NeedleworkError(f"{self.directory}: no trial has the score {score!r}; `rows()` shows which there are")
        several: list[str] = []
        for name in ("task", "mode", "boundary"):
            if frame.duplicated(["model", *several, "intervention"]).any():
                several.append(name)
        labels = [display_name(": ".join(row), 60) for row in frame[[*several, "intervention"]].itertuples(index=False)]
        places = {label: place for place, label in enumerate(dict.fromkeys(labels))}
        frame["place"] = [places[label] for label in labels]
        ax = new_axes(ax, 7.0, 0.25 * len(places) + 1.0)
        models = list(frame.groupby("model", sort=False))
        for i, (model, part) in enumerate(models):
            aside = 0.5 * ((i + 0.5) / len(models) - 0.5)
            spread = np.maximum([part[score] - part["low"], part["high"] - part[score]], 0)
            color = light_colors()[f"c{1 + i % 6}"]
            ax.errorbar(
                part[score], part["place"] + aside, xerr=spread, fmt="o", markersize=4, capsize=2, color=color, label=model
            )
        ax.set_yticks(range(len(places)), list(places), parse_math=False)
        ax.invert_yaxis()
        ax.set(xlabel=f"{score}, 95 % intervals")
        if len(models) > 1:
            ax.legend(frameon=False)
        else:
            ax.set_title(models[0][0])
        return ax

    def _repr_html_(self) -> str:
        failed = "" if self.sound else ": some trials failed, or an intervention had no effect"
        columns = ("rule", "claim", "model", "verdict", "why")
        rows = [(str(x.number), x.title, x.model, x.word, x.sentence) for x in self.verdicts() if x.word != "not run"]
        return Table(columns, rows, f"{self.directory}{failed}").to_html()

    def verdicts(self) -> list[Verdict]:
        """Return the verdict on each claim for each model."""
        from needlework.analysis.reader import load
        from needlework.analysis.verdicts import verdicts

        return verdicts(load([self.directory]))

    def report(self, out: str | Path | None = None) -> Path:
        """Write report.html and its figures into `out` (default: the run's directory); return the path of report.html."""
        from needlework.reports import report

        return report(self.directory, out)
