"""The real MMLU from a directory, in both layouts it is handed around in."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from needlework import NeedleworkError
from needlework.lmeval.documents import find_dataset, use_local_data

ROWS = [
    ("What is 1 + 1, in words?", ["one", "two", "three", 'the "other" two'], 1),
    ("And 1 + 2?", ["one", "two", "three", "four"], 2),
]


def write_csv(folder: Path) -> None:
    for split in ("dev", "val", "test"):
        (folder / split).mkdir(parents=True)
        with (folder / split / f"anatomy_{split}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([q, *options, "ABCD"[answer]] for q, options, answer in ROWS)


def write_parquet(folder: Path) -> None:
    import pandas

    table = pandas.DataFrame(
        {"question": [r[0] for r in ROWS], "subject": "anatomy", "choices": [r[1] for r in ROWS], "answer": [r[2] for r in ROWS]}
    )
    (folder / "anatomy").mkdir(parents=True)
    for split in ("dev", "validation", "test"):
        half = len(table) // 2
        table[:half].to_parquet(folder / "anatomy" / f"{split}-00000-of-00002.parquet")
        table[half:].to_parquet(folder / "anatomy" / f"{split}-00001-of-00002.parquet")


@pytest.mark.parametrize("write", [write_csv, write_parquet])
@pytest.mark.parametrize("below", ["", "mmlu"])
def test_both_layouts_of_mmlu_give_the_same_questions(write: Any, below: str, tmp_path: Path) -> None:
    write(tmp_path / below if below else tmp_path / "x")
    found = find_dataset(tmp_path if below else tmp_path / "x", "cais/mmlu", "anatomy")
    assert sorted(found) == ["dev", "test", "validation"]
    for split in found.values():
        assert [(d["question"], d["choices"], d["answer"]) for d in split] == ROWS
        assert set(split["subject"]) == {"anatomy"}
    assert find_dataset(tmp_path, "cais/mmlu", "botany") is None


def test_a_wrong_line_is_named(tmp_path: Path) -> None:
    write_csv(tmp_path)
    file = tmp_path / "test" / "anatomy_test.csv"
    file.write_text(file.read_text() + "a question,one,two,three,E\n")
    with pytest.raises(NeedleworkError, match=r"anatomy_test\.csv, question 3"):
        find_dataset(tmp_path, "cais/mmlu", "anatomy")


def test_other_datasets_are_found_by_name_and_the_loader_comes_back(tmp_path: Path) -> None:
    import datasets
    import pandas

    (tmp_path / "glue" / "cola").mkdir(parents=True)
    pandas.DataFrame({"sentence": ["a b"], "label": [1]}).to_parquet(tmp_path / "glue" / "cola" / "validation.parquet")
    stock = datasets.load_dataset
    with use_local_data(tmp_path):
        assert datasets.load_dataset(path="nyu-mll/glue", name="cola")["validation"][0] == {"sentence": "a b", "label": 1}
    assert datasets.load_dataset is stock
    with pytest.raises(NeedleworkError, match="no such directory"), use_local_data(tmp_path / "none"):
        pass
