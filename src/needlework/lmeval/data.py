"""Datasets of lm-eval tasks from a directory of the user's own, where there is no hub. Free of torch.

    DIR/test/anatomy_test.csv                     the original MMLU archive: question, four options, letter; no header
    DIR/anatomy/test-00000-of-00001.parquet       a copy of the hub's repository: a directory per configuration

Any other dataset is found by the name that its task gives: DIR/nyu-mll/glue/cola/validation-*.parquet, or DIR/glue/cola/...
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from needlework.errors import NeedleworkError

MMLU = ("cais/mmlu", "hails/mmlu_no_train", "mmlu")
LETTERS = "ABCD"
_CSV_SPLITS = {"dev": "dev", "validation": "val", "test": "test"}  # lm-eval's name -> the archive's name
_OTHER_NAMES = {"val": "validation", "valid": "validation"}
_FORMATS = ("parquet", "jsonl", "json")


@contextmanager
def offered(folder: Path | None) -> Iterator[None]:
    """While lm-eval loads its tasks, datasets that the directory holds come from there."""
    if folder is None:
        yield
        return
    if not folder.is_dir():
        raise NeedleworkError(f"--data {folder}: there is no such directory")
    import datasets

    stock = datasets.load_dataset

    def load(path: str, name: str | None = None, **options: Any) -> Any:
        return find(folder, path, name) or stock(path, name, **options)

    datasets.load_dataset = load
    try:
        yield
    finally:
        datasets.load_dataset = stock


def find(folder: Path, path: str, name: str | None) -> Any:
    """A dataset by the names that a task gives it, or None if the directory does not hold it."""
    from datasets import DatasetDict

    if path in MMLU and name:
        archive = mmlu_csv(folder, name)
        if archive:
            return DatasetDict(archive)
    for place in _places(folder, path, name):
        splits = _splits(place)
        if splits:
            return DatasetDict({split: _table(files) for split, files in splits.items()})
    return None


def _places(folder: Path, path: str, name: str | None) -> Iterator[Path]:
    roots = [folder / path, folder / Path(path).name] + ([folder] if path in MMLU else [])
    for root in roots:
        yield from ([root / name, root / "data" / name] if name else [root, root / "data"])


def mmlu_csv(folder: Path, subject: str) -> dict[str, Any]:
    """The splits of one subject from the original archive; empty if it is not there."""
    from datasets import Dataset

    splits: dict[str, Any] = {}
    for root in (folder, folder / "data", folder / "mmlu", folder / "mmlu" / "data"):
        for split, short in _CSV_SPLITS.items():
            file = root / short / f"{subject}_{short}.csv"
            if file.is_file():
                splits.setdefault(split, Dataset.from_list([_question(file, i, row) for i, row in enumerate(_rows(file), 1)]))
    return splits


def _rows(file: Path) -> Iterator[list[str]]:
    with file.open(encoding="utf-8", newline="") as lines:
        yield from (row for row in csv.reader(lines) if row)


def _question(file: Path, line: int, row: list[str]) -> dict[str, Any]:
    letter = row[-1].strip()
    if len(row) != 6 or letter not in LETTERS or len(letter) != 1:
        raise NeedleworkError(f"{file}, question {line}: expected a question, four options and a letter A to D, got {row}")
    return {"question": row[0], "subject": file.stem.rsplit("_", 1)[0], "choices": row[1:5], "answer": LETTERS.index(letter)}


def _splits(place: Path) -> dict[str, list[Path]]:
    """Files of one directory by split: test.parquet, test-00000-of-00002.parquet, test/anything.parquet."""
    for suffix in _FORMATS:
        files_of: dict[str, list[Path]] = {}
        for file in sorted(place.glob(f"*.{suffix}")):
            files_of.setdefault(file.stem.split("-")[0], []).append(file)
        for file in sorted(place.glob(f"*/*.{suffix}")) if not files_of else ():
            files_of.setdefault(file.parent.name, []).append(file)
        if files_of:
            return {_OTHER_NAMES.get(split, split): files for split, files in files_of.items()}
    return {}


def _table(files: list[Path]) -> Any:
    """One split. Read here rather than by the hub's loader, which would copy it into a cache first."""
    from datasets import concatenate_datasets

    return concatenate_datasets([_read(file) for file in files])


def _read(file: Path) -> Any:
    import pandas
    import pyarrow
    import pyarrow.parquet
    from datasets import Dataset

    try:
        if file.suffix == ".parquet":
            return Dataset(pyarrow.parquet.read_table(file))
        return Dataset.from_pandas(pandas.read_json(file, lines=file.suffix == ".jsonl"))
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise NeedleworkError(f"{file} cannot be read: {error}") from None
