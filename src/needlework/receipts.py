"""Receipts: counts of what interventions did to each request, taken where the edits are applied."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

Count = dict[str, int]
NOTHING_TO_HIDE = "nothing to hide"  # start of a note: a part of the intervention could hide no key, so that it had no effect


@dataclass(frozen=True)
class Receipt:
    """Counts of what an intervention did to one request.

    Attributes:
        counts: By (layer, phase): positions, head outputs zeroed, columns changed, states cut or cleared.
        swapped: Halves of the cache that were taken from a twin.
        notes: Warnings: where an intervention had nothing to act on.
    """

    counts: dict[tuple[int, str], Count] = field(default_factory=dict)
    swapped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def total(self, what: str, phase: str | None = None, layer: int | None = None) -> int:
        """Return the sum of one count over all phases and layers, or over the given ones."""
        return sum(
            count.get(what, 0) for (at, when), count in self.counts.items() if phase in (None, when) and layer in (None, at)
        )

    def frame(self) -> pandas.DataFrame:
        """Return one row per layer and phase, with a column for each count."""
        import pandas

        names = list(dict.fromkeys(name for count in self.counts.values() for name in count))
        rows = [(*key, *(count.get(name, 0) for name in names)) for key, count in sorted(self.counts.items())]
        return pandas.DataFrame(rows, columns=["layer", "phase", *names])

    def _repr_html_(self) -> str:
        from needlework.tables import Table

        swapped = f"; swapped: {', '.join(self.swapped)}" if self.swapped else ""
        return Table.from_frame(self.frame(), "; ".join((f"receipt{swapped}", *self.notes))).to_html()

    def __add__(self, other: Receipt) -> Receipt:
        """Return the sum of two receipts, such as of prefill and decode."""
        counts: dict[tuple[int, str], Count] = {}
        for key, count in (*self.counts.items(), *other.counts.items()):
            total = counts.setdefault(key, {})
            for what, number in count.items():
                total[what] = total.get(what, 0) + number
        return Receipt(counts, self.swapped + other.swapped, self.notes + other.notes)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Receipt:
        """Return the receipt that `to_dict` wrote."""
        counts = {
            (row["layer"], row["phase"]): {what: number for what, number in row.items() if what not in ("layer", "phase")}
            for row in content.get("layers", ())
        }
        return cls(counts, tuple(content.get("swapped", ())), tuple(content.get("notes", ())))

    def to_dict(self) -> dict[str, Any]:
        rows = [{"layer": at, "phase": when, **count} for (at, when), count in sorted(self.counts.items())]
        return {"layers": rows, "swapped": list(self.swapped), "notes": list(self.notes)}


def nothing_to_hide(receipt: Mapping[str, Any] | None) -> bool:
    """Return whether a receipt (as `to_dict` writes it) has the note that a part of its intervention had nothing to hide."""
    return any(note.startswith(NOTHING_TO_HIDE) for note in (receipt or {}).get("notes", ()))


class Tally:
    """Counters for all requests (slots) of one batch; tensors stay on their device until `receipt` is called."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._constant: dict[tuple[int, str, str], list[int]] = defaultdict(lambda: [0] * slots)
        self._tensors: dict[tuple[int, str, str], Any] = {}
        self._rows: tuple[Any, list[int]] | None = None

    def add(self, layer: int, phase: str, what: str, slots: Any, amount: Any) -> None:
        """Add to a count.

        Args:
            slots: Tensor [rows]; the slot of each row.
            amount: An int for all rows, or a tensor [rows].
        """
        key = (layer, phase, what)
        if isinstance(amount, int):
            if self._rows is None or self._rows[0] is not slots:
                self._rows = (slots, slots.tolist())
            counts = self._constant[key]
            for slot in self._rows[1]:
                counts[slot] += amount
            return
        total = self._tensors.get(key)
        if total is None:
            total = self._tensors[key] = amount.new_zeros(self.slots, dtype=slots.dtype)
        total.index_add_(0, slots, amount.to(total.dtype))

    def receipt(self, slot: int) -> Receipt:
        """Return the nonzero counts of one slot."""
        counts: dict[tuple[int, str], Count] = defaultdict(Counter)
        for (layer, phase, what), numbers in (*self._constant.items(), *self._tensors.items()):
            if number := int(numbers[slot]):
                counts[layer, phase][what] += number
        return Receipt({at: dict(count) for at, count in counts.items()})
