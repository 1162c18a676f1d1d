"""Sample the trials behind each point and cell of a figure: at most 20 each, wrong answers first, within a byte budget."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from needlework.analysis.frame import Frame, Ints
from needlework.analysis.reader import opened
from needlework.stats import SEED
from needlework.terminal import display_name

MOST = 20
BUDGET_BYTES = 4_500_000
LONGEST_PROMPT = 6_000  # characters; longer prompts are cut to their beginning, needles and end
AROUND = 1_200  # characters kept at the beginning, around each needle and at the end
LONGEST_ANSWER = 2_000
_COLUMNS = "rowid, prompt, prompt_tokens, target, output, intervention, sample, spans, scores"


@dataclass
class Browser:
    """Registry of the trials behind each mark of a figure, which then reads a sample of them from the stores."""

    frame: Frame
    most: int = MOST  # trials per mark
    budget_bytes: int = BUDGET_BYTES
    cells: dict[str, tuple[str, Ints]] = field(default_factory=dict)  # key -> (title, trials)

    def add(self, title: str, rows: Ints) -> str:
        """Register trials and return the key under which the page finds them."""
        if len(rows) == 0:
            return ""
        key = f"c{len(self.cells)}"
        self.cells[key] = (title, rows)
        return key

    def collect(self, used: set[str] | None = None) -> dict[str, Any]:
        """Return the sampled trials as JSON-ready data: prompts, trials and the trials of each key.

        Every key gets its first trial before any gets its second, and so on until the budget is spent, so that a small
        budget does not leave later figures without trials. By default all keys are used.
        """
        wanted_cells = {key: cell for key, cell in self.cells.items() if used is None or key in used}
        chosen = {}
        for key, (_, rows) in wanted_cells.items():  # in random but seeded order, wrong answers before right ones
            shuffled = np.random.default_rng((SEED, int(key[1:]))).permutation(rows)
            right = np.nan_to_num(self.frame.values("correct", shuffled), nan=0.0)
            chosen[key] = shuffled[np.argsort(right, kind="stable")][: self.most]
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
            wrong = int(np.sum(self.frame.values("correct", rows) == 0))
            cells[key] = {"title": title, "n": len(rows), "wrong": wrong, "trials": shown[key]}
        return {"prompts": book.prompts, "trials": book.trials, "cells": cells}

    def _read(self, rows: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """Yield (trial, stored columns), opening each store once."""
        for source, of_source in self.frame.data[["source", "row"]].iloc[list(rows)].groupby("source"):
            trial_of = dict(zip(of_source["row"].tolist(), of_source.index.tolist(), strict=True))
            ids = list(trial_of)
            with closing(opened(self.frame.directories[source])) as store:
                for start in range(0, len(ids), 500):
                    batch = ids[start : start + 500]
                    query = f"SELECT {_COLUMNS} FROM trials WHERE rowid IN ({','.join('?' * len(batch))})"
                    for values in store.db.execute(query, batch):
                        yield trial_of[values[0]], (source, *values)


@dataclass
class _Book:
    """Trials and prompts without duplicates, and their approximate size in bytes."""

    prompts: list[Any] = field(default_factory=list)
    trials: list[Any] = field(default_factory=list)
    size: int = 0
    _prompt_at: dict[Any, int] = field(default_factory=dict)
    _trial_at: dict[tuple[int, int], int] = field(default_factory=dict)

    def entry(self, values: Any) -> int:
        """Return the index of a trial, given its columns, adding it if it is new."""
        source, row, prompt, tokens, target, output, intervention, sample, spans, scores = values
        if (source, row) in self._trial_at:
            return self._trial_at[source, row]
        marks = needle_characters(prompt, tokens, json.loads(spans), target)
        known = (prompt, tuple(marks))
        if known not in self._prompt_at:
            text, marks = shortened(prompt, marks)
            self.prompts.append(pieces(text, marks))
            self._prompt_at[known] = len(self.prompts) - 1
            self.size += len(text) + 30
        plain = {name: round(value, 3) for name, value in json.loads(scores).items() if value is not None}
        words = [display_name(sample, 200), display_name(intervention, 400), target[:LONGEST_ANSWER], output[:LONGEST_ANSWER]]
        self.trials.append([self._prompt_at[known], *words, plain])
        self.size += sum(map(len, words)) + 60 + 16 * len(plain)
        return self._trial_at.setdefault((source, row), len(self.trials) - 1)


def needle_characters(prompt: str, tokens: int, spans: dict[str, Any], target: str) -> list[tuple[int, int]]:
    """Return the character ranges of the needle in the prompt.

    Exact if every token is a word (the toy language). Otherwise occurrences of the answer are returned instead, because the
    store has token positions but no tokenizer.
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
    """Cut a long prompt to its beginning, its first two needles and its end, and state how much is left out."""
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
    """Split a text at its marks: plain, marked, plain, ... Offsets would differ in JavaScript, which counts UTF-16 units."""
    cut, done = [], 0
    for start, end in sorted(marks):
        if start >= done:
            cut += [text[done:start], text[start:end]]
            done = end
    return [*cut, text[done:]]
