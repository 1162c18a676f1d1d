"""The trials behind each point and cell: a seeded choice of at most 20, failures first, within a budget of bytes."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from needlework.report.frame import Frame, Ints
from needlework.report.names import shown
from needlework.report.reader import opened
from needlework.stats import SEED

MOST = 20
BUDGET_BYTES = 4_500_000
LONGEST_PROMPT = 6_000  # characters; longer ones are shown around their needle
AROUND = 1_200
LONGEST_ANSWER = 2_000
_COLUMNS = "rowid, prompt, prompt_tokens, target, output, intervention, sample, spans, scores"


@dataclass
class Browser:
    """Collects which trials stand behind which mark of a figure, then reads the chosen ones."""

    frame: Frame
    most: int = MOST
    budget_bytes: int = BUDGET_BYTES
    cells: dict[str, tuple[str, Ints]] = field(default_factory=dict)

    def add(self, title: str, rows: Ints) -> str:
        """The key under which the page finds these trials."""
        if len(rows) == 0:
            return ""
        key = f"c{len(self.cells)}"
        self.cells[key] = (title, rows)
        return key

    def _chosen(self, number: int, rows: Ints) -> Ints:
        """At most `most` of them: a seeded shuffle, wrong answers before right ones."""
        shuffled = np.random.default_rng((SEED, number)).permutation(rows)
        right = np.nan_to_num(self.frame.values("correct", shuffled), nan=0.0)
        return shuffled[np.argsort(right, kind="stable")][: self.most]

    def collect(self, used: set[str] | None = None) -> dict[str, Any]:
        """Prompts, trials, and the trials of each key (of `used` ones only), rank by rank until the budget is spent."""
        wanted_cells = {key: cell for key, cell in self.cells.items() if used is None or key in used}
        chosen = {key: self._chosen(int(key[1:]), rows) for key, (_, rows) in wanted_cells.items()}
        shown: dict[str, list[Any]] = {key: [] for key in wanted_cells}
        book = _Book()
        for rank in range(self.most):
            wanted = {key: int(rows[rank]) for key, rows in chosen.items() if rank < len(rows)}
            if not wanted or book.size > self.budget_bytes:
                break
            read = dict(self._read(sorted(set(wanted.values()))))
            for key, row in wanted.items():
                if book.size > self.budget_bytes:
                    break
                shown[key].append(book.entry(read[row]))
        cells = {}
        for key, (title, rows) in wanted_cells.items():
            right = self.frame.values("correct", rows)
            wrong = int(np.sum(right == 0))
            cells[key] = {"title": title, "n": len(rows), "wrong": wrong, "trials": shown[key]}
        return {"prompts": book.prompts, "trials": book.trials, "cells": cells}

    def _read(self, rows: Sequence[int]) -> Iterator[tuple[int, Any]]:
        by_source: dict[int, dict[int, int]] = {}
        for row in rows:
            by_source.setdefault(int(self.frame.source[row]), {})[int(self.frame.row[row])] = row
        for source, ids in by_source.items():
            store = opened(self.frame.directories[source])
            try:
                for values in _by_ids(store.db, list(ids)):
                    yield ids[values[0]], (source, *values)
            finally:
                store.close()


def _by_ids(db: sqlite3.Connection, ids: list[int]) -> Iterator[Any]:
    for start in range(0, len(ids), 500):
        batch = ids[start : start + 500]
        yield from db.execute(f"SELECT {_COLUMNS} FROM trials WHERE rowid IN ({','.join('?' * len(batch))})", batch)


@dataclass
class _Book:
    """Trials and prompts, each once."""

    prompts: list[Any] = field(default_factory=list)
    trials: list[Any] = field(default_factory=list)
    size: int = 0
    _prompt_at: dict[Any, int] = field(default_factory=dict)
    _trial_at: dict[tuple[int, int], int] = field(default_factory=dict)

    def entry(self, values: Any) -> int:
        """The number of a trial, given its columns; a new one is written down."""
        source, row, prompt, tokens, target, output, intervention, sample, spans, scores = values
        if (source, row) in self._trial_at:
            return self._trial_at[source, row]
        marks = needle_characters(prompt, tokens, json.loads(spans), target)
        at = self._prompt(prompt, marks)
        plain = {name: round(value, 3) for name, value in json.loads(scores).items() if value is not None}
        words = [shown(sample, 200), shown(intervention, 400), target[:LONGEST_ANSWER], output[:LONGEST_ANSWER]]
        self.trials.append([at, *words, plain])
        self.size += sum(map(len, words)) + 60 + 16 * len(plain)
        return self._trial_at.setdefault((source, row), len(self.trials) - 1)

    def _prompt(self, prompt: str, marks: list[tuple[int, int]]) -> int:
        key = (prompt, tuple(marks))
        if key not in self._prompt_at:
            text, marks = shortened(prompt, marks)
            self.prompts.append(pieces(text, marks))
            self._prompt_at[key] = len(self.prompts) - 1
            self.size += len(text) + 30
        return self._prompt_at[key]


def needle_characters(prompt: str, tokens: int, spans: dict[str, Any], target: str) -> list[tuple[int, int]]:
    """Where the needle stands in the prompt's text.

    Exact where a token is a word (the zoo's language). Elsewhere a store holds token positions but no tokenizer, so the
    places where the answer stands are marked instead.
    """
    words = prompt.split(" ")
    front = tokens - len(words)  # BOS
    needle = spans.get("needle") or []
    if needle and 0 <= front <= 1:
        ends = np.cumsum([len(word) + 1 for word in words])
        starts = np.concatenate([[0], ends])
        inside = [(a - front, b - front) for a, b in needle if 0 <= a - front < b - front <= len(words)]
        return [(int(starts[a]), int(ends[b - 1]) - 1) for a, b in inside]
    marks: list[tuple[int, int]] = []
    at = prompt.find(target) if target else -1
    while at >= 0 and len(marks) < 8:
        marks.append((at, at + len(target)))
        at = prompt.find(target, at + len(target))
    return marks


def shortened(prompt: str, marks: list[tuple[int, int]]) -> tuple[str, list[tuple[int, int]]]:
    """A long prompt cut to its beginning, its needles and its end; what is left out is counted."""
    if len(prompt) <= LONGEST_PROMPT:
        return prompt, marks
    needles = [(max(0, a - AROUND // 2), b + AROUND // 2) for a, b in marks[:2]]
    text, moved, done = "", [], 0
    for start, end in sorted([(0, AROUND), *needles, (len(prompt) - AROUND, len(prompt))]):
        start, end = max(start, done), min(end, len(prompt))
        if start >= end:
            continue
        if start > done:
            text += f"\n[… {start - done:,} characters left out …]\n"
        shift = len(text) - start
        moved += [(a + shift, b + shift) for a, b in marks if start <= a and b <= end]
        text += prompt[start:end]
        done = end
    return text, moved


def pieces(text: str, marks: list[tuple[int, int]]) -> list[str]:
    """The text cut at its marks: plain, marked, plain, ... (no offsets: JavaScript counts characters in another way)."""
    cut, done = [], 0
    for start, end in sorted(marks):
        if start >= done:
            cut += [text[done:start], text[start:end]]
            done = end
    return [*cut, text[done:]]
