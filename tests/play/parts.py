"""The parts of an intervention as JSON values, as the page sends them."""

from __future__ import annotations

from typing import Any

import needlework as nw


def parts_of(text: str) -> list[dict[str, Any]]:
    """The parts of an intervention's text, without the fields that have their default."""
    parts: list[dict[str, Any]] = []
    for part in nw.parse(text).parts:
        given: dict[str, Any] = {"name": part.name}
        for key, info in type(part).model_fields.items():
            value = getattr(part, key)
            if value != info.default:
                given[key] = {"ranking": _lists(value.order)} if isinstance(value, nw.Ranking) else _lists(value)
        parts.append(given)
    return parts


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, (list, tuple)) else value
