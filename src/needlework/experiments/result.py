"""The result of `nw.run`: rows, verdicts and report of a run. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from needlework.checks import Checkup
from needlework.results import Store, fingerprint
from needlework.results.export import read_trials

if TYPE_CHECKING:
    import pandas

    from needlework.analysis.verdicts import Verdict


@dataclass(frozen=True)
class Result:
    """A run and its directory. Methods read from the store when they are called."""

    directory: Path
    sound: bool  # no trial of the plan failed, and every `limit_context` hid keys in some trial

    @property
    def fingerprint(self) -> str:
        """Hash of all rows of the plan (see `results.fingerprint`): equal runs have equal hashes."""
        return fingerprint(self.directory)

    def checkups(self) -> dict[str, Checkup]:
        """Return the doctor's results by model name, as recorded when the run loaded the model."""
        store = Store(self.directory)
        try:
            about = store.meta("models") or {}
        finally:
            store.close()
        return {name: Checkup.from_dict(model["checkup"]) for name, model in about.items() if "checkup" in model}

    def rows(self) -> pandas.DataFrame:
        """Return one row per trial of the plan, with the columns of docs/store.md and each score as `score_NAME`."""
        import pandas

        store = Store(self.directory)
        try:
            columns, rows = read_trials(store, "asked ORDER BY experiment, model, task, id", json_text=False)
            return pandas.DataFrame(list(rows), columns=columns)
        finally:
            store.close()

    def verdicts(self) -> list[Verdict]:
        """Return the verdict on each claim for each model."""
        from needlework.analysis.reader import load
        from needlework.analysis.verdicts import verdicts

        return verdicts(load([self.directory]))

    def report(self, out: str | Path | None = None) -> Path:
        """Write report.html and its figures into `out` (default: the run's directory); return the path of report.html."""
        from needlework.reports import report

        return report(self.directory, out)
