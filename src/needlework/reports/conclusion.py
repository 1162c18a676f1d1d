"""What a report found, in plain words: a headline, and one or two sentences with numbers for each model."""

from __future__ import annotations

import re
from collections.abc import Sequence

from needlework.analysis.frame import Frame
from needlework.analysis.model_trials import by_boundary
from needlework.analysis.verdicts import RULES, Verdict, share
from needlework.reports.svg import UNJUDGED

MOST_MODELS = 4  # that have sentences of their own
MOST_OWN = 2  # interventions outside all figures of the claims that a sentence names
NOT_SO = {  # claim -> what is the case where it is not supported
    "segregation": "retrieval does not rest on attention alone",
    "few_heads": "few heads do not suffice",
    "no_rescue": "another prompt brings some retrieval back",
    "exposure": "the needle need not be in sight",
    "context": "one phase without context costs too much, or both cost too little",
    "double_dissociation": "the two sides do not divide the work",
    "memory": "answers do not follow the KV cache",
}


def headline(frame: Frame, judged: Sequence[Verdict]) -> str:
    """Return the outcome of the first claim that was judged, over all models to which it applies."""
    for rule in RULES:
        of_claim = [v for v in judged if v.claim == rule.claim and v.word not in UNJUDGED]
        if not of_claim:
            continue
        claim, count = rule.title[:1].lower() + rule.title[1:], len(of_claim)
        supported, against, weak = (
            sum(verdict.word == word for verdict in of_claim) for word in ("supported", "not supported", "not testable")
        )
        where = f"In {of_claim[0].model}" if count == 1 else "In both models" if count == 2 else f"In all {count} models"
        if supported == count:
            return f"{where}, {claim}"
        if supported:
            return f"{rule.title} in {supported} of {count} models"
        if against:
            return f"{where if against == count else f'In {against} of {count} models'}, {NOT_SO[rule.claim]}"
        if weak == count:
            return f"{where}, retrieval is too weak to test the claims"
        return f"{where}, it is open whether {claim}"
    return f"What interventions do to {', '.join(list(frame.models)[:MOST_MODELS])}"


def conclusions(frame: Frame, judged: Sequence[Verdict]) -> list[tuple[str, str]]:
    """Return (model, what was found): the numbers that decided the first two claims, and those of own interventions."""
    found = []
    for model in frame.models:
        of_model = [v for v in judged if v.model == model and v.word not in UNJUDGED]
        said = [_first_clause(verdict.sentence) for verdict in of_model[:2]]
        trials = by_boundary(frame, model)[0]
        own = [(label, trials.accuracy(trials.retrieval(text))) for label, text in trials.unplaced]
        said += [f"under {label}, it finds {share(e, 'the needles')}" for label, e in own if e.n][:MOST_OWN]
        if said:
            supported = sum(verdict.word == "supported" for verdict in of_model)
            tally = f" {supported} of {len(of_model)} claims are supported." if len(of_model) > 1 else ""
            found.append((model, "; ".join(text[:1].lower() + text[1:] for text in said) + "." + tally))
    return found[:MOST_MODELS]


def _first_clause(sentence: str) -> str:
    """Return a sentence up to its first full stop or semicolon that is not inside brackets or a number, without an aside."""
    clause = re.match(r"(?:[^;.\[]|\.\d|\[[^\]]*\])*", sentence)
    return re.sub(r"(?<=\]) \(.*", "", clause[0].strip()) if clause else sentence
