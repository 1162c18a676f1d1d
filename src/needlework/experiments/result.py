"""What a run gives back: its rows, its verdicts and its report. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from needlework.checkup.findings import Checkup
from needlework.errors import NeedleworkError
from needlework.experiments.export import trial_columns, values
from needlework.store import Store, fingerprint

if TYPE_CHECKING:
    import pandas

    from needlework.verdicts import Verdict


@dataclass(frozen=True)
class Result:
    """A run in its directory. All that can be asked of it is read from there, when it is asked."""

    directory: Path
    sound: bool  # no trial of the plan failed, and every condition hid something that it was to hide

    @property
    def fingerprint(self) -> str:
        """A hash over trial id, tokens and scores: the same plan and seed give the same one. `needlework compare` says more."""
        return fingerprint(self.directory)

    def checkups(self) -> dict[str, Checkup]:
        """What the doctor found of each model when this run first loaded it."""
        store = Store(self.directory)
        try:
            about = store.meta("models") or {}
        finally:
            store.close()
        return {name: Checkup.from_dict(model["checkup"]) for name, model in about.items() if "checkup" in model}

    def rows(self) -> pandas.DataFrame:
        """One row for each trial that the plan asks for, with the columns of docs/store.md and each score as `score_NAME`."""
        try:
            import pandas
        except ImportError:
            raise NeedleworkError("rows() needs pandas: pip install 'needlework[pandas]', or export the run to csv") from None
        store = Store(self.directory)
        try:
            columns, scores = trial_columns(store)
            asked = store.rows("asked ORDER BY experiment, model, task, id")
            return pandas.DataFrame([values(row, scores) for row in asked], columns=columns)
        finally:
            store.close()

    def verdicts(self) -> list[Verdict]:
        """What the numbers say of each claim, for each model."""
        from needlework.report.evidence import verdicts
        from needlework.report.reader import load

        return verdicts(load([self.directory]))

    def report(self, out: str | Path | None = None) -> Path:
        """Write report.html and its figures into `out` (by default the run's directory); the path of report.html."""
        from needlework.report import report

        return report(self.directory, out)
