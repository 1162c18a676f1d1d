"""The store of a run: rows, reading and writing, comparison. Other packages import from here."""

from needlework.results.comparison import Comparison, compare, fingerprint
from needlework.results.rows import (
    ANSWER_FINISH,
    JSON_COLUMNS,
    LM_EVAL,
    SCHEMA_VERSION,
    SEMANTICS_VERSION,
    WHOLE_COLUMNS,
    Observation,
    Row,
    digest,
)
from needlework.results.store import Store, StoreError, claimed, is_full, writing

__all__ = [
    "ANSWER_FINISH",
    "JSON_COLUMNS",
    "LM_EVAL",
    "SCHEMA_VERSION",
    "SEMANTICS_VERSION",
    "WHOLE_COLUMNS",
    "Comparison",
    "Observation",
    "Row",
    "Store",
    "StoreError",
    "claimed",
    "compare",
    "digest",
    "fingerprint",
    "is_full",
    "writing",
]
