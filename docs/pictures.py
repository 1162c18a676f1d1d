"""Draw the diagrams of docs/concepts.md and README: python docs/pictures.py"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parent / "images"
INK, FAINT, PAPER = "#1f2937", "#6b7280", "#ffffff"
ATTENTION, RECURRENT, NEEDLE, OFF = "#4f46e5", "#0d9488", "#d97706", "#dc2626"


class Drawing:
    """An SVG picture on a white card, so that it reads on light and dark pages."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, fill: str, text: str = "", ink: str = PAPER, size: int = 13) -> None:
        self.parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="5" fill="{fill}"/>')
        if text:
            self.text(x + w / 2, y + h / 2 + size * 0.36, text, ink, size, "middle")

    def outline(self, x: float, y: float, w: float, h: float, stroke: str) -> None:
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="5" fill="none" stroke="{stroke}"'
            ' stroke-width="1.5" stroke-dasharray="5 4"/>'
        )

    def text(
        self, x: float, y: float, text: str, ink: str = INK, size: int = 13, anchor: str = "start", weight: int = 400
    ) -> None:
        self.parts.append(
            f'<text x="{x}" y="{y}" fill="{ink}" font-size="{size}" text-anchor="{anchor}"'
            f' font-weight="{weight}">{escape(text)}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, ink: str = FAINT) -> None:
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{ink}" stroke-width="1.6" marker-end="url(#head)"/>'
        )

    def cross(self, x: float, y: float, r: float = 6) -> None:
        for dx in (r, -r):
            self.parts.append(f'<line x1="{x - dx}" y1="{y - r}" x2="{x + dx}" y2="{y + r}" stroke="{OFF}" stroke-width="2.6"/>')

    def save(self, name: str) -> None:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" role="img"'
            f' font-family="system-ui, sans-serif"><title>{escape(self.title)}</title><defs><marker id="head" viewBox="0 0 8 8"'
            f' refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{FAINT}"/></marker></defs>'
            f'<rect width="{self.width}" height="{self.height}" rx="10" fill="{PAPER}"/>'
        )
        IMAGES.mkdir(exist_ok=True)
        (IMAGES / f"{name}.svg").write_text("\n".join([head, *self.parts, "</svg>"]) + "\n", encoding="utf-8")


def tokens(d: Drawing, x: float, y: float, words: Iterable[str], needle: range, decode: int) -> list[float]:
    """Draw a row of tokens and return their centres."""
    centres = []
    for i, word in enumerate(words):
        w = 14 + 7.4 * len(word)
        fill = NEEDLE if i in needle else "#e5e7eb" if i < decode else "#c7d2fe"
        d.box(x, y, w, 26, fill, word, PAPER if i in needle else INK, 12)
        centres.append(x + w / 2)
        x += w + 5
    return centres


def idea() -> None:
    d = Drawing(840, 300, "A hybrid model, what is switched off in it, and what is measured")
    d.text(24, 34, "A hybrid model reads a text that hides a needle", weight=600)
    tokens(
        d,
        24,
        48,
        ["the", "king", "sees", "a", "boat", ".", "the code is 4 7 1", ".", "question : code ?", "4", "7", "1"],
        range(6, 7),
        9,
    )
    d.text(612, 93, "answer", FAINT, 12)
    kinds = ["recurrent", "recurrent", "attention", "recurrent", "recurrent", "attention"]
    for i, kind in enumerate(kinds):
        y = 252 - i * 26
        d.box(24, y, 150, 22, ATTENTION if kind == "attention" else RECURRENT, kind, size=12)
        if kind == "attention":
            for head in range(10):
                d.box(184 + head * 17, y + 4, 13, 14, ATTENTION if head in (3, 7) else "#e0e7ff")
                if head not in (3, 7):
                    d.cross(190.5 + head * 17, y + 11, 3.5)
    d.text(184, 168, "keep 2 of 10 heads", FAINT, 12)
    d.arrow(366, 190, 404, 190)
    d.text(416, 134, "Interventions", weight=600)
    for i, line in enumerate(
        (
            "ablate heads, attention, recurrent layers",
            "keep the k best heads, or k at random",
            "hide the needle from attention",
            "limit the context, cut or swap memory",
            "while reading, while answering, or both",
        )
    ):
        d.text(416, 156 + i * 19, f"• {line}", size=12)
    d.text(698, 134, "Measurements", weight=600)
    for i, line in enumerate(("needles found", "forced choice", "facts known", "perplexity")):
        d.text(698, 156 + i * 19, f"• {line}", size=12)
    d.text(698, 156 + 4 * 19, "with n, intervals,", FAINT, 12)
    d.text(698, 156 + 5 * 19, "random controls", FAINT, 12)
    d.save("idea")


def phases() -> None:
    d = Drawing(820, 190, "Prefill, decode, the boundary token and the needle's span")
    words = ["the", "code", "of", "loran", "is", "4 7 1", ".", "a", "boat", ".", "code", "of", "loran", "?", ":", "4", "7", "1"]
    at = tokens(d, 24, 70, words, range(6), 15)
    d.outline(at[0] - 22, 62, at[5] - at[0] + 52, 42, NEEDLE)
    d.text(at[0] - 20, 54, 'span "needle"', NEEDLE, 12, weight=600)
    d.outline(at[14] - 16, 62, 32, 42, ATTENTION)
    d.text(at[14], 54, "boundary token", ATTENTION, 12, "middle", 600)
    d.arrow(24, 128, at[13] + 10, 128)
    d.text((24 + at[13]) / 2, 150, "prefill: the prompt is read", INK, 13, "middle")
    d.arrow(at[14] - 10, 128, at[-1] + 14, 128)
    d.text(at[15] + 20, 150, "decode: the answer", INK, 13, "middle")
    d.text(
        at[15] + 20,
        170,
        "(the boundary token is decode unless you say otherwise)",
        FAINT,
        11,
        "end" if at[15] > 600 else "middle",
    )
    d.save("phases")


def sites() -> None:
    d = Drawing(820, 330, "Where interventions act in an attention layer and in a recurrent layer")
    d.text(24, 32, "Attention layer", ATTENTION, 14, weight=600)
    steps = ("scores q·k", "softmax", "× values", "head outputs", "projection")
    for i, step in enumerate(steps):
        d.box(24 + i * 158, 48, 128, 32, ATTENTION, step)
        if i:
            d.arrow(24 + i * 158 - 28, 64, 24 + i * 158 - 3, 64)
    for i, names in enumerate(
        (
            ("limit_context", "block_attention"),
            ("expose_tokens",),
            (),
            ("keep_heads", "ablate_heads", "only_heads"),
            ("ablate_attention", "(site='block')"),
        )
    ):
        for j, name in enumerate(names):
            d.text(88 + i * 158, 102 + j * 17, name, INK, 12, "middle")
    d.text(24, 192, "Recurrent layer", RECURRENT, 14, weight=600)
    for i, step in enumerate(("input", "convolution", "state", "groups, gate", "projection")):
        d.box(24 + i * 158, 208, 128, 32, RECURRENT, step)
        if i:
            d.arrow(24 + i * 158 - 28, 224, 24 + i * 158 - 3, 224)
    rows = (
        (),
        ("ablate_recurrent,", "block_recurrent", "(site='conv')"),
        ("ablate_recurrent,", "block_recurrent", "(site='state'); reset_state"),
        ("ablate_recurrent_groups",),
        ("ablate_recurrent", "(site='block')"),
    )
    for i, names in enumerate(rows):
        for j, name in enumerate(names):
            d.text(88 + i * 158, 262 + j * 17, name, INK, 12, "middle")
    d.text(
        24,
        318,
        "Between prefill and decode: swap_memory takes the KV cache or the recurrent state from another prompt.",
        FAINT,
        12,
    )
    d.save("sites")


if __name__ == "__main__":
    idea()
    phases()
    sites()
