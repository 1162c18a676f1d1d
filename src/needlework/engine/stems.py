"""Which shared beginnings of prompts are worth reading once: a prefix tree, pruned by what each branch would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Stem:
    """A beginning that several prompts share. Its parent is a shorter stem that it continues."""

    tokens: tuple[int, ...]
    parent: Stem | None = None
    readers: int = 0  # prompts and stems that continue right here
    children: list[Stem] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)

    @property
    def new_tokens(self) -> int:
        return len(self.tokens) - (len(self.parent.tokens) if self.parent else 0)


def find_stems(prompts: Sequence[tuple[int, ...]], overhead_tokens: float) -> list[Stem | None]:
    """For each prompt the longest stem worth starting from. A stem leaves every reader at least one token to read.

    Reading a stem apart costs forwards of its own, and prompts that start from different stems cannot be read in one
    batch: `overhead_tokens` is what one more forward costs, in tokens.
    """
    if len(prompts) < 2:
        return [None] * len(prompts)
    root = _tree(prompts)
    _prune(root, overhead_tokens)
    stems: list[Stem | None] = [None] * len(prompts)
    _assign(root, stems)
    return stems


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the common beginning, short of the last token of either."""
    low, high = 0, min(len(a), len(b)) - 1
    if high <= 0:
        return 0
    while low < high:  # compare halves at C speed instead of token by token
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _tree(prompts: Sequence[tuple[int, ...]]) -> Stem:
    """Neighbours in sorted order share the most, so one pass with a stack finds every branching point."""
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    root = Stem(())
    stack = [root]
    for place, i in enumerate(order):
        before = _common(prompts[order[place - 1]], prompts[i]) if place else 0
        after = _common(prompts[i], prompts[order[place + 1]]) if place + 1 < len(order) else 0
        closed = None
        while len(stack[-1].tokens) > before:
            closed = stack.pop()
        if closed is not None and len(stack[-1].tokens) < before:  # a branching point inside the stem just closed
            between = Stem(prompts[i][:before], stack[-1], children=[closed])
            stack[-1].children[-1] = between
            closed.parent = between
            stack.append(between)
        if after > len(stack[-1].tokens):
            stem = Stem(prompts[i][:after], stack[-1])
            stack[-1].children.append(stem)
            stack.append(stem)
        stack[-1].prompts.append(i)
    return root


def _prune(stem: Stem, overhead_tokens: float) -> None:
    """Dissolve stems that save less than they cost, from the leaves up."""
    for child in list(stem.children):
        _prune(child, overhead_tokens)
        readers = len(child.children) + len(child.prompts)
        saved = (readers - 1) * child.new_tokens
        if saved <= overhead_tokens * readers:
            stem.children.remove(child)
            stem.children += child.children
            stem.prompts += child.prompts
            for grandchild in child.children:
                grandchild.parent = stem


def _assign(stem: Stem, stems: list[Stem | None]) -> None:
    stem.readers = len(stem.children) + len(stem.prompts)
    for i in stem.prompts:
        stems[i] = stem if stem.tokens else None
    for child in stem.children:
        if stem.parent is None and not stem.tokens:
            child.parent = None
        _assign(child, stems)
