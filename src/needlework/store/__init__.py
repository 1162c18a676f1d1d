"""The store of a run. Whoever reads or writes a run imports from here."""

from needlework.store.comparison import Comparison, compare, fingerprint
from needlework.store.database import Store
from needlework.store.disk import StoreError, claimed, is_full, made, writing
from needlework.store.rows import (
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
    "made",
    "writing",
]
