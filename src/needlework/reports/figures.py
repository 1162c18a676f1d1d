"""The figures of a report: title, caption and the function that builds the panels of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from needlework.analysis.frame import Frame
from needlework.reports import curves, maps_and_dots
from needlework.reports.browser import Browser
from needlework.reports.panels import Figure, Panel


@dataclass(frozen=True)
class FigureKind:
    """Texts of a figure and the function that builds its panels."""

    link: str  # name in the page's table of contents
    title: str
    caption: str
    make_panels: Callable[[Frame, Browser], Sequence[Panel]]


def make_figure(name: str, frame: Frame, browser: Browser) -> Figure:
    """Build one figure of FIGURES; it has no panels if none of its trials were run."""
    kind = FIGURES[name]
    return Figure(name, kind.title, kind.caption, kind.make_panels(frame, browser))


FIGURES = {
    "heads": FigureKind(
        "Heads kept",
        "Abilities against the share of heads kept",
        "In every attention layer and at every token the k best heads are kept, by the negative entropy of their"
        " attention unless said otherwise; the others are silenced. Retrieval counts needles inside the window. Grey:"
        " as many heads drawn at random. Knowledge is asked as cloze (nothing to look up) and as letter choice (the"
        " letter must be looked up in the prompt). Bands are 95 % intervals.",
        curves.heads,
    ),
    "needles": FigureKind(
        "Needles",
        "Needles found, by length and depth",
        "Each cell is the share of needles that are repeated exactly, with heads silenced at every position where"
        " that was run, else in decode only. The drawn line is the edge of the attention window: beyond it the needle"
        " is out of sight. Choose a cell to read its trials.",
        maps_and_dots.needles,
    ),
    "exposure": FigureKind(
        "Exposure",
        "What attention may see of the needle",
        "Retrieval under pairs of exposure modes, applied to attention after the softmax. keep: unchanged. omit: the"
        " needle's columns are zero. only: all others are zero. null: all are zero. balanced: every head gets the mean"
        " needle mass, and nothing else.",
        maps_and_dots.exposure,
    ),
    "dissociation": FigureKind(
        "Two sides",
        "Each side silenced in turn",
        "What is left of retrieval and of knowledge without attention, without the recurrent memory (each token is"
        " read alone), without the recurrent layers, and without both. Chance-corrected shares, paired 95 % intervals.",
        maps_and_dots.dissociation,
    ),
    "memory": FigureKind(
        "Memory",
        "Whose memory answers?",
        "After reading, one half of the memory is taken from a twin prompt of the same length with another value; no"
        " weight is touched. If answers follow the KV cache, swapping it gives the twin's value, and swapping the"
        " recurrent state changes nothing.",
        maps_and_dots.swap,
    ),
    "head-map": FigureKind(
        "Head map",
        "Which heads look at the needle",
        "Mean attention on the needle's tokens while the answer is produced, per layer and query head, nothing silenced.",
        maps_and_dots.head_map,
    ),
    "context": FigureKind(
        "Context",
        "How much context retrieval needs",
        "Attention sees only the last n tokens: while reading, while answering, or in both. Limited only while"
        " reading, the needle stays in sight while answering. The map crosses both limits.",
        curves.context,
    ),
    "hops": FigureKind(
        "Hops",
        "What attention does while reading",
        "One hop: the value stands behind the asked name. Two hops: there stands whose value it is, and that needle"
        " is further up. With no heads while reading, what was to be looked up on the way is not there when the answer"
        " is given; what stands in one needle still is.",
        maps_and_dots.hops,
    ),
    "layouts": FigureKind(
        "Prompts",
        "Other prompts: read twice, question first",
        "Retrieval when the prompt is read twice (JRT) and when the question comes before the context, with and"
        " without heads. A model without attention shows whether the prompt can help at all.",
        maps_and_dots.layouts,
    ),
    "tasks": FigureKind(
        "Tasks",
        "Every task under the main conditions",
        "Share of right answers, trials in and out of the window together. Tasks that choose among options have a"
        " chance above zero.",
        maps_and_dots.tasks,
    ),
}
