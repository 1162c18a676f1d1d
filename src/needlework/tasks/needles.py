"""The paper's needle, and needles like it about other cities: distractors, wrong options and twins."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

NEEDLE = "The best thing to do in {key} is {value}."
KEY, VALUE = "San Francisco", "eat a sandwich and sit in Dolores Park on a sunny day"
QUESTION = "What is the best thing to do in {key}?"
GRADED = {"eat a sandwich": 1.0, "dolores park": 0.5, "sit in dolores park": 0.5, "on a sunny day": 1.0}


class Other(BaseModel):
    """Another needle of the same kind: put into the context as a distractor, or offered as an option only."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    key: str = ""
    value: str


OTHERS = tuple(
    Other(key=key, value=value)
    for key, value in (
        ("Chicago", "climb a tower and look over the lake on a windy day"),
        ("Lisbon", "ride a tram and drink coffee in the old town on a warm morning"),
        ("Toronto", "rent a boat and row around the islands on a quiet afternoon"),
        ("Vienna", "hear an opera and walk in the palace garden on a mild evening"),
        ("Nairobi", "watch the lions and camp beside the river on a clear night"),
        ("Oslo", "take a sauna and swim in the cold harbour on a bright day"),
        ("Kyoto", "visit a temple and sit under the maple trees on a foggy morning"),
        ("Lima", "eat grilled fish and watch the surfers on a cloudy day"),
        ("Dublin", "hear a fiddle and talk to strangers in a pub on a rainy night"),
        ("Sydney", "take a ferry and have a picnic on the beach on a hot day"),
        ("Cairo", "buy some spices and float down the river on a golden evening"),
        ("Prague", "cross the bridge and feed the swans on a snowy morning"),
    )
)


def filled(template: str, key: str, value: str) -> str:
    return template.replace("{key}", key).replace("{value}", value)
