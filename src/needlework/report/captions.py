"""The words around each figure, and the shipped plan that gives the trials of each claim."""

from __future__ import annotations

from collections.abc import Sequence

from needlework.report.spec import Figure, Panel

WORDS: dict[str, tuple[str, str]] = {  # figure -> title, caption
    "heads": (
        "Abilities against the share of heads kept",
        "In every attention layer and at every token the k best heads are kept, by the negative entropy of their attention"
        " unless said otherwise; the others are silenced. Retrieval counts needles inside the window. Grey: as many heads"
        " drawn at random. Knowledge is asked as cloze (nothing to look up) and as letter choice (the letter must be"
        " looked up in the prompt). Bands are 95 % intervals.",
    ),
    "needles": (
        "Needles found, by length and depth",
        "Each cell is the share of needles that are repeated exactly, with heads silenced at every position where that was"
        " run, else in decode only. The drawn line is the edge of the attention window: beyond it the needle is out of"
        " sight. Choose a cell to read its trials.",
    ),
    "exposure": (
        "What attention may see of the needle",
        "Retrieval under pairs of exposure modes, applied to attention after the softmax. keep: unchanged. omit: the"
        " needle's columns are zero. only: all others are zero. null: all are zero. balanced: every head gets the mean"
        " needle mass, and nothing else.",
    ),
    "dissociation": (
        "Each side silenced in turn",
        "What is left of retrieval and of knowledge without attention, without the recurrent memory (each token is read"
        " alone), without the recurrent layers, and without both. Chance-corrected shares, paired 95 % intervals.",
    ),
    "memory": (
        "Whose memory answers?",
        "After reading, one half of the memory is taken from a twin prompt of the same length with another value; no weight"
        " is touched. If answers follow the KV cache, swapping it gives the twin's value, and swapping the recurrent state"
        " changes nothing.",
    ),
    "head-map": (
        "Which heads look at the needle",
        "Mean attention on the needle's tokens while the answer is produced, per layer and query head, nothing silenced.",
    ),
    "context": (
        "How much context retrieval needs",
        "Attention sees only the last n tokens: while reading, while answering, or in both. Limited only while reading, the"
        " needle stays in sight while answering. The map crosses both limits.",
    ),
    "hops": (
        "What attention does while reading",
        "One hop: the value stands behind the asked name. Two hops: there stands whose value it is, and that needle is further"
        " up. With no heads while reading, what was to be looked up on the way is not there when the answer is given; what"
        " stands in one needle still is.",
    ),
    "layouts": (
        "Other prompts: read twice, question first",
        "Retrieval when the prompt is read twice (JRT) and when the question comes before the context, with and without"
        " heads. A model without attention shows whether the prompt can help at all.",
    ),
    "tasks": (
        "Every task under the main conditions",
        "Share of right answers, trials in and out of the window together. Tasks that choose among options have a chance"
        " above zero.",
    ),
}
LINKS = {  # figure -> its name in the contents
    "heads": "Heads kept",
    "needles": "Needles",
    "exposure": "Exposure",
    "dissociation": "Two sides",
    "memory": "Memory",
    "head-map": "Head map",
    "context": "Context",
    "hops": "Hops",
    "layouts": "Prompts",
    "tasks": "Tasks",
}
PLAN_OF_CLAIM = {  # the shipped plan that gives the trials of each claim
    "segregation": "01",
    "few_heads": "02",
    "no_rescue": "03",
    "exposure": "04",
    "context": "09",
    "double_dissociation": "07",
    "memory": "11",
}


def figure(name: str, panels: Sequence[Panel]) -> Figure:
    title, caption = WORDS[name]
    return Figure(name, title, caption, panels)
