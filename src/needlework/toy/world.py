"""The toy language as tasks and training import it. Free of torch and of outside text.

All data are endless and seeded. A `Stream(split, ...)` hashes its split's name into its seed; training documents use
the split "train" and nothing else may, so whatever is made from another split is held out by construction. The facts
of the fixed world are the exception by design: they are what a model can only know from training. What is held out for
them is the question around them: form, neighbouring text, wrong options and their order.
"""

from __future__ import annotations

from needlework.toy.facts import (
    ALL_FACTS,
    SUBJECT_NAMES,
    SUBJECTS,
    cloze,
    letter_choice,
    letter_lookup,
    statement,
)
from needlework.toy.judgements import KINDS as JUDGEMENTS
from needlework.toy.judgements import judgement
from needlework.toy.needles import (
    LAYOUTS,
    RELATION_NAMES,
    RELATIONS,
    needles,
    niah,
    scene,
    sentence,
    variables,
)
from needlework.toy.recall import copying, key_values, phone_book
from needlework.toy.sample import EVAL_SPLIT, Sample, Words
from needlework.toy.words import BOS, PAD, UNK, VOCABULARY, WORD_ID

__all__ = [
    "ALL_FACTS",
    "BOS",
    "EVAL_SPLIT",
    "JUDGEMENTS",
    "LAYOUTS",
    "PAD",
    "RELATIONS",
    "RELATION_NAMES",
    "SUBJECTS",
    "SUBJECT_NAMES",
    "UNK",
    "VOCABULARY",
    "WORD_ID",
    "Sample",
    "Words",
    "cloze",
    "copying",
    "judgement",
    "key_values",
    "letter_choice",
    "letter_lookup",
    "needles",
    "niah",
    "phone_book",
    "scene",
    "sentence",
    "statement",
    "variables",
]
