"""The store of a run: rows, reading and writing, comparison. Other packages import from here."""

from needlework.results.comparison import Comparison as Comparison
from needlework.results.comparison import compare as compare
from needlework.results.comparison import fingerprint as fingerprint
from needlework.results.rows import ANSWER_FINISH as ANSWER_FINISH
from needlework.results.rows import LM_EVAL as LM_EVAL
from needlework.results.rows import SEMANTICS_VERSION as SEMANTICS_VERSION
from needlework.results.rows import Observation as Observation
from needlework.results.rows import Row as Row
from needlework.results.rows import digest as digest
from needlework.results.store import Store as Store
from needlework.results.store import StoreError as StoreError
from needlework.results.store import claimed as claimed
from needlework.results.store import is_full as is_full
from needlework.results.store import writing as writing
