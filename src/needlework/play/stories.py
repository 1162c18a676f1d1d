"""The guided tour: eight states of the page that tell what the paper found, each with one plain sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from needlework.anatomy import Anatomy
from needlework.errors import NeedleworkError
from needlework.play.state import intervention_of


@dataclass(frozen=True)
class Story:
    """One state of the tour."""

    id: str
    title: str
    sentence: str
    parts: Sequence[dict[str, Any]]
    missing: str = ""  # why this model cannot show it

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "parts": list(self.parts)}


def stories(anatomy: Anatomy) -> list[Story]:
    """Return the tour for a model; stories that it has no parts for say so."""
    few = min(2, min((part.query_heads for _, part in anatomy.attention_parts()), default=2))
    heads = {1: "one head", 2: "two heads"}[few]
    told = [
        Story("untouched", "Untouched", "Nothing is changed: the model reads the text and finds the needle, if it can.", []),
        Story(
            "no-heads",
            "No heads",
            "Every attention head is off: if attention does the retrieving, the value is lost, and only an answer's form stays.",
            [{"name": "ablate_attention"}],
        ),
        Story(
            "few-heads",
            heads.capitalize(),
            f"In every layer and for every token, the {heads} with the sharpest attention stay on: in some models this suffices.",
            [{"name": "keep_heads", "k": few}],
        ),
        Story(
            "random-heads",
            f"{heads.capitalize()} at random",
            "As many heads stay on, but drawn at random: if the answer is as good, it did not matter which heads were kept.",
            [{"name": "keep_heads", "k": few, "by": "random"}],
        ),
        Story(
            "hidden-answering",
            "Hidden while answering",
            "Attention cannot see the needle while the model answers: what it read before does not help if it must look again.",
            [{"name": "expose_tokens", "phase": "decode", "mode": "omit"}],
        ),
        Story(
            "hidden-reading",
            "Hidden while reading",
            "Attention cannot see the needle while the model reads, but sees it when it answers: looking back is often enough.",
            [{"name": "expose_tokens", "phase": "prefill", "mode": "omit"}],
        ),
        Story(
            "no-recurrence",
            "No recurrence",
            "The recurrent layers see each token alone: attention is untouched, but without their memory the text falls apart.",
            [{"name": "ablate_recurrent"}],
        ),
        Story(
            "swapped",
            "Memory swapped",
            "Before it answers, the model gets the keys and values of a twin text with another value: the answer follows them, if"
            " they hold the needle.",
            [{"name": "swap_memory", "half": "kv"}],
        ),
    ]
    return [_checked(story, anatomy) for story in told]


def _checked(story: Story, anatomy: Anatomy) -> Story:
    try:
        intervention_of(story.parts).check(anatomy)
    except NeedleworkError:
        side = "recurrent layers that it could do without" if story.id == "no-recurrence" else "attention"
        return Story(story.id, story.title, story.sentence, story.parts, f"{anatomy.architecture} has no {side}")
    return story
