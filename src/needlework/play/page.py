"""The page as HTML: served with links to its modules, or exported as one file that holds them."""

from __future__ import annotations

import base64
import html
import json
from importlib import resources
from typing import Any

# The page's own modules, by the names under which they import each other ("play/app.js").
MODULES = (
    "app.js",
    "answer.js",
    "attention.js",
    "code.js",
    "controls.js",
    "dom.js",
    "griffin.js",
    "griffin_acts.js",
    "griffin_model.js",
    "intervention.js",
    "layers.js",
    "prompt.js",
    "provider.js",
    "recorded.js",
    "server.js",
)
EXPORTED_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data: blob:; style-src 'unsafe-inline'; img-src data:; worker-src blob: data:"
)


def static(name: str) -> str:
    """Return the text of a file of the page."""
    return resources.files("needlework.play").joinpath("static", name).read_text(encoding="utf-8")


def served_page(name: str, nonce: str) -> str:
    """Return the page that asks its server; `nonce` is that of the content security policy."""
    modules = {f"play/{module}": f"./static/{module}" for module in MODULES}
    head = '<link rel="stylesheet" href="static/style.css">'
    scripts = (
        f'<script type="importmap" nonce="{nonce}">{_json({"imports": modules})}</script>\n'
        f'<script type="module" nonce="{nonce}">import {{ start }} from "play/app.js"; start();</script>'
    )
    return _filled(name, head, scripts)


def exported_page(name: str, data: dict[str, Any], weights: bytes | None = None, report: str = "") -> str:
    """Return the page as one file.

    Args:
        data: What static/provider.js describes: description, stories, samples, rankings, and recorded answers or a model.
        weights: Weights of the model that runs in the browser.
        report: Relative address of a report that the page links to.
    """
    encoded = {module: base64.b64encode(static(module).encode()).decode() for module in MODULES}
    modules = {f"play/{module}": f"data:text/javascript;base64,{text}" for module, text in encoded.items()}
    policy = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(EXPORTED_POLICY)}">'
    head = f"{policy}\n<style>\n{static('style.css')}</style>"
    scripts = f'<script type="application/json" id="play-data">{_json({**data, "report": report})}</script>\n'
    if weights is not None:
        scripts += f'<script type="text/plain" id="play-weights">{base64.b64encode(weights).decode()}</script>\n'
    scripts += (
        f'<script type="importmap">{_json({"imports": modules})}</script>\n'
        '<script type="module">import { start } from "play/app.js"; start();</script>'
    )
    return _filled(name, head, scripts)


def _filled(name: str, head: str, scripts: str) -> str:
    page = static("page.html").replace("{{name}}", html.escape(name))
    before, _, rest = page.partition("<!-- head -->")
    middle, _, after = rest.partition("<!-- scripts -->")
    return f"{before}{head}{middle}{scripts}{after}"


def _json(value: Any) -> str:
    """Return JSON that cannot end the script element it stands in."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")
