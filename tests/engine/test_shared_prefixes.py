"""Shared beginnings: every stem is a true beginning, and sharing never reads more than reading everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from needlework.engine.prefill import SharedPrefix, find_shared_prefixes

prompts = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=9).map(tuple), min_size=1, max_size=14, unique=True)


def chain(stem: SharedPrefix | None) -> list[SharedPrefix]:
    found = []
    while stem is not None:
        found.append(stem)
        stem = stem.parent
    return found


@given(prompts, st.sampled_from([0.0, 0.5, 2.0]))
def test_stems_are_beginnings_that_leave_something_to_read(some: list[tuple[int, ...]], overhead: float) -> None:
    for prompt, stem in zip(some, find_shared_prefixes(some, overhead), strict=True):
        for link in chain(stem):
            assert prompt[: len(link.tokens)] == link.tokens
            assert 0 < len(link.tokens) < len(prompt)
            assert link.new_tokens > 0


@given(prompts)
def test_with_free_forwards_every_token_is_read_once(some: list[tuple[int, ...]]) -> None:
    stems = find_shared_prefixes(some, 0.0)
    links = {id(link): link for stem in stems for link in chain(stem)}
    read = sum(link.new_tokens for link in links.values())
    read += sum(len(p) - (len(s.tokens) if s else 0) for p, s in zip(some, stems, strict=True))
    # A brute-force count: distinct beginnings, but the last token of a prompt is always read for itself.
    distinct = {p[:i] for p in some for i in range(1, len(p))}
    assert read == len(distinct) + len(some)


@given(prompts, st.sampled_from([0.0, 1.0]))
def test_readers_are_counted(some: list[tuple[int, ...]], overhead: float) -> None:
    stems = find_shared_prefixes(some, overhead)
    links = {id(link): link for stem in stems for link in chain(stem)}
    for link in links.values():
        starts_here = sum(stem is link for stem in stems) + sum(other.parent is link for other in links.values())
        assert link.users == starts_here >= 2


def test_a_costly_forward_dissolves_small_stems() -> None:
    some = [(1, 2, 3, 4, 5, i) for i in range(6, 10)]
    assert find_shared_prefixes(some, 0.0)[0] is not None
    assert find_shared_prefixes(some, 100.0) == [None] * 4
