"""The page in a real browser: every control changes the answer as `subject.generate` does under the text that the page shows."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from parts import parts_of

import needlework as nw
from needlework.play.export import export
from needlework.play.playground import Playground
from needlework.play.state import stories, text_of

pytestmark = [pytest.mark.slow, pytest.mark.serial]


class View:
    """A page, with what a test reads from it."""

    def __init__(self, page: Any, playground: Playground) -> None:
        self.page, self.playground = page, playground

    def wait(self, expression: str) -> None:
        """Wait until an expression is true. Playwright's own waiting needs eval, which the page's policy forbids."""
        for _ in range(2400):
            if self.page.evaluate(expression):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never true: {expression}")

    def settle(self) -> None:
        self.wait("Boolean(globalThis.playground && !document.querySelector('#answer-view.busy'))")

    @property
    def text(self) -> str:
        return str(self.page.input_value("#text"))

    @property
    def said(self) -> list[int]:
        self.settle()
        return list(self.page.evaluate("playground.answer.tokens.map(token => token.id)"))

    @property
    def shown(self) -> list[str]:
        return list(self.page.locator(".one:first-child button.chip .word").all_inner_texts())

    def check(self) -> None:
        """The answer on the page is that of `subject.generate` under the intervention text on the page."""
        said = self.said
        prompt = self.page.evaluate("playground.state.prompt")
        encoded = self.page.evaluate("playground.answer.prompt")
        text = self.page.evaluate("import('play/provider.js').then(m => m.promptText(playground.state.prompt))")
        spans = {"needle": tuple((start, end) for start, end in encoded["needle"])}
        twin = self.page.evaluate(
            "import('play/provider.js').then(m => m.promptText(m.twinPrompt(playground.state.prompt)))",
        )
        twins = [{"twin": twin}] if prompt["twin"] else None
        (told,) = self.playground.subject.generate([text], self.text, spans=[spans], twins=twins, max_new_tokens=12, stop=["."])
        assert said == list(told.tokens), self.text
        assert self.shown == [token.strip() for token in self.playground.texts(told.tokens)], self.text


@pytest.fixture
def visit(chromium: Any, served: Any) -> Iterator[Callable[..., View]]:
    """Opens the page; errors in its script and requests to elsewhere fail the test."""
    troubles: list[str] = []
    pages = []

    def go(address: str = "", playground: Playground | None = None, **options: Any) -> View:
        page = chromium.new_page(**options)
        pages.append(page)
        full = address if "://" in address else served.address + address
        own = full.partition("#")[0] if full.startswith("file:") else "/".join(full.split("/")[:3])
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda m: troubles.append(m.text) if m.type == "error" and "Failed to load" not in m.text else None)
        page.on("request", lambda r: troubles.append(r.url) if not r.url.startswith((own, "data:", "blob:")) else None)
        page.goto(full)
        view = View(page, playground or served.playground)
        view.settle()
        return view

    yield go
    for page in pages:
        page.close()
    assert troubles == []


def switch(view: View, name: str) -> Any:
    return view.page.get_by_role("switch", name=name, exact=True)


SWITCHES = {
    "layer 2, head 3": "ablate_heads(heads=[[2, 3]])",
    "layer 2, all 10 heads": "ablate_attention(layers=[2])",
    "all attention heads": "ablate_attention()",
    "layer 0, recurrent block 4": "ablate_recurrent_groups(groups=[[0, 4]])",
    "layer 3, recurrent memory": "ablate_recurrent(layers=[3])",
    "layer 1, convolution": "ablate_recurrent(layers=[1], site='conv')",
    "layer 4, state": "ablate_recurrent(layers=[4], site='state')",
    "all recurrent layers": "ablate_recurrent()",
}


def test_every_kind_of_switch_acts_and_is_undone(visit: Any) -> None:
    view = visit()
    view.check()
    for name, text in SWITCHES.items():
        switch(view, name).click()
        assert view.text == text
        assert switch(view, name).get_attribute("aria-checked") == "false"
        view.check()
        switch(view, name).click()
        assert view.text == "none"
        assert switch(view, name).get_attribute("aria-checked") == "true"
    for name in ("layer 2, head 0", "layer 5, head 9", "layer 0, state"):
        switch(view, name).click()
    assert view.text == "ablate_heads(heads=[[2, 0], [5, 9]]) + ablate_recurrent(layers=[0], site='state')"
    view.check()


def test_the_slider_and_the_ways_to_choose_heads(visit: Any) -> None:
    view = visit()
    slider, way = view.page.get_by_label("Heads kept in each layer"), view.page.get_by_label("Chosen by")
    slider.fill("2")
    assert view.text == "keep_heads(k=2)"
    view.check()
    for score in ("l2", "norm", "random"):
        way.select_option(score)
        assert view.text == f"keep_heads(k=2, by='{score}')"
        view.check()
    view.page.get_by_role("button", name="Draw again").click()
    assert view.text == "keep_heads(k=2, by='random', seed=1)"
    view.check()
    way.select_option("ranking:needle_mass")
    view.wait("document.querySelector('#text').value.includes('ranking')")
    assert view.text.startswith("keep_heads(k=2, by=ranking('2.")
    view.check()
    way.select_option("entropy")
    for phase, name in (("prefill", "reading"), ("decode", "answering")):
        view.page.get_by_role("group", name="Off while").first.get_by_label(name, exact=True).check(force=True)
        assert view.text == f"keep_heads(phase='{phase}', k=2)"
        view.check()
    slider.fill("10")
    assert view.text == "none"
    slider.fill("0")
    view.check()


def test_hiding_limiting_cutting_and_swapping(visit: Any) -> None:
    view = visit()
    page = view.page
    for mode in ("omit", "only", "null", "balanced"):
        page.get_by_label("While answering").select_option(mode)
        assert view.text == f"expose_tokens(phase='decode', mode='{mode}')"
        view.check()
    page.get_by_label("While reading").select_option("balanced")
    assert view.text == "expose_tokens(mode='balanced')"
    page.get_by_label("While answering").select_option("keep")
    view.check()
    page.locator("#reset").click()
    limit = page.get_by_label("Only the last … tokens")
    limit.fill("9")
    limit.press("Enter")
    first = page.get_by_label("and the first …")
    first.fill("2")
    first.press("Tab")
    assert view.text == "limit_context(tokens=9, sinks=2)"
    view.check()
    page.get_by_role("group", name="Limited while").get_by_label("answering").check(force=True)
    assert view.text == "limit_context(phase='decode', tokens=9, sinks=2)"
    view.check()
    page.locator("#reset").click()
    page.get_by_label("Switching a layer off cuts").select_option("block")
    switch(view, "layer 1, recurrent memory").click()
    assert view.text == "ablate_recurrent(layers=[1], site='block')"
    view.check()
    page.locator("#reset").click()
    page.get_by_label("keys and values of attention").check()
    assert view.text == "swap_memory(half='kv')"
    view.check()
    assert page.evaluate("playground.answer.text").startswith("4 6 3")  # the twin's value
    page.get_by_label("recurrent states").check()
    assert view.text == "swap_memory(half='kv') + swap_memory(half='recurrent')"
    view.check()


def test_the_stories_are_told_in_order(visit: Any) -> None:
    view = visit()
    for story in stories(view.playground.anatomy):
        view.page.locator(f"#story-{story.id}").click()
        assert view.page.locator("#sentence").inner_text() == story.sentence
        assert view.page.locator(f"#story-{story.id}").get_attribute("aria-current") == "step"
        assert view.text == text_of(story.parts)
        view.check()


def test_undo_redo_reset_and_comparison(visit: Any) -> None:
    view = visit()
    page = view.page
    assert page.locator("#undo").is_disabled()
    page.locator("#story-no-heads").click()
    view.settle()
    assert page.locator(".one:nth-child(2) .badge").inner_text() == "right"
    assert page.locator(".one:nth-child(1) .badge").inner_text() == "wrong"
    page.locator("#story-few-heads").click()
    page.locator("#undo").click()
    assert view.text == "ablate_attention()"
    page.locator("#redo").click()
    assert view.text == "keep_heads(k=2)"
    page.locator("body").click(position={"x": 2, "y": 2})
    page.keyboard.press("Control+z")
    page.keyboard.press("Control+z")
    assert view.text == "none"
    page.keyboard.press("Control+Shift+Z")
    assert view.text == "ablate_attention()"
    page.locator("#reset").click()
    assert view.text == "none"
    view.check()


def test_a_state_can_be_typed_sent_as_an_address_and_taken_away(visit: Any, tmp_path: Path) -> None:
    view = visit()
    page = view.page
    text = "keep_heads(phase='decode', k=1) + limit_context(phase='prefill', tokens=30)"
    page.locator("#text").fill("limit_context(30, phase='prefill')+keep_heads(1,phase='decode')")
    page.locator("#text").press("Enter")
    assert view.text == text
    view.check()
    assert page.get_by_label("Heads kept in each layer").input_value() == "1"
    other = visit(page.url[page.url.index("#") :])
    assert other.text == text
    assert other.said == view.said
    page.locator("#copy").click()
    code = {}
    for kind in ("Text", "Python", "Plan"):
        page.locator("#code-kinds").get_by_role("button", name=kind).click()
        code[kind] = page.locator("#code-text").input_value()
    page.keyboard.press("Escape")
    assert code["Text"] == text
    scope: dict[str, Any] = {}
    exec(code["Python"], scope)
    assert list(scope["answer"].tokens) == view.said
    (tmp_path / "plan.yaml").write_text(code["Plan"])
    rows = nw.run(tmp_path / "plan.yaml", tmp_path / "run").rows()
    texts = dict(zip(rows["intervention"], rows["output"], strict=True))
    on_page = {name: view.page.evaluate(f"playground.{name}.text") for name in ("untouchedAnswer", "answer")}
    assert texts == {"none": on_page["untouchedAnswer"], text: on_page["answer"]}
    wrongs = {"keep_heads(k=": "is no value", "drop_heads()": "no part drop_heads", "keep_heads(k=1) 2": "too much"}
    for wrong, said in wrongs.items():
        page.locator("#text").fill(wrong)
        page.locator("#text").press("Enter")
        assert said in page.locator("#text-trouble").inner_text()


def test_what_no_control_shows_is_named_and_stays(visit: Any) -> None:
    text = "keep_heads(phase='prefill', k=2) + limit_context(layers=[2], tokens=9)"
    for address in ("#do=ablate_heads(heads=[[2, 1]], phase='decode') %2B " + text.replace("+", "%2B"), ""):
        view = visit(address)
        if not address:
            view.page.locator("#text").fill(text + " + ablate_heads(phase='decode', heads=[[2, 1]])")
            view.page.locator("#text").press("Enter")
        told = view.page.locator("#text-trouble").inner_text()
        assert "keep_heads(phase='prefill', k=2) (the controls of heads have one phase)" in told
        assert "limit_context(layers=[2], tokens=9) (the controls have one limit for all layers)" in told
        assert "ablate_heads" not in told, "a switch shows it"
        view.check()
        switch(view, "layer 5, head 0").click()
        assert view.text == f"ablate_heads(phase='decode', heads=[[2, 1], [5, 0]]) + {text}"
        view.check()
        view.page.locator("#undo").click()
        assert view.page.locator("#text-trouble").inner_text() == told
        view.page.locator("#reset").click()
        assert view.page.locator("#text-trouble").is_hidden()
        assert view.text == "none"


def test_broken_addresses_are_told_and_open_the_usual_state(visit: Any) -> None:
    for address in ("#do=evil()", "#draw=1/2/3", "#prompt=%7B", "#do=keep_heads(k=99999)"):
        view = visit(address)
        told = view.page.locator("#text-trouble, #answer-view .trouble").all_inner_texts()
        assert any(told), address


def test_prompts_are_drawn_and_typed(visit: Any) -> None:
    view = visit()
    page = view.page
    page.get_by_label("Length").select_option("64")
    page.get_by_label("Depth of the needle").select_option("100")
    page.get_by_role("button", name="Draw another").click()
    view.wait("playground.state.draw.seed === 1")
    view.check()
    expected = view.playground.sample(64, 100, 1)
    assert page.locator("mark").inner_text().strip() == expected.needle
    page.locator("#type summary").click()
    digits = " ".join(reversed(expected.target.split()))
    needle = expected.needle.replace(expected.target, digits)
    page.locator("#prompt-needle").fill(needle)
    view.wait("playground.state.draw === null")
    view.check()
    assert digits in page.evaluate("playground.answer.text")
    page.locator("#prompt-before").fill("context : the king has no business in mordor . ")
    page.wait_for_selector("#answer-view .trouble:not([hidden])")
    assert "'mordor'" in page.locator("#answer-view .trouble").inner_text()
    page.locator("#undo").click()
    view.check()
    page.locator("#prompt-after").fill(". the king sees a boat " * 10_000)
    page.wait_for_selector("#answer-view .trouble:not([hidden])")
    assert "200000 characters" in page.locator("#answer-view .trouble").inner_text()
    page.locator("#prompt-after").fill(". the king sees a boat " * 30_000)
    view.wait("document.querySelector('#answer-view .trouble').textContent.includes('KiB')")
    page.locator("#undo").click()
    page.locator("#undo").click()
    view.check()


def test_markup_from_a_model_stays_text(visit: Any, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "<img src=x onerror=alert(1)>"
    make = served.playground.generate

    def wicked(request: Any) -> dict[str, Any]:
        answer = json.loads(json.dumps(make(request)))
        answer["tokens"][0]["text"] = answer["text"] = evil
        answer["prompt"]["tokens"][3] = evil
        return dict(answer)

    monkeypatch.setattr(served.playground, "generate", wicked)
    view = visit()
    assert view.shown[0] == evil
    assert view.page.locator("main img").count() == 0


def test_attention_is_drawn_for_the_token_and_head_that_is_pointed_at(visit: Any) -> None:
    view = visit()
    page = view.page
    view.wait("playground.attention !== null")
    assert "answer token 1" in page.locator("#looks").inner_text()
    page.locator(".one:first-child button.chip").nth(1).hover()
    view.wait("playground.attention?.token === 1")
    page.locator(".heat").nth(3).click()
    assert page.locator("#looks").inner_text() == "Layer 2, head 3: attention from answer token 2."
    weights = page.evaluate("playground.attention.layers[0].weights[3]")
    marked = page.evaluate(
        "[...document.querySelectorAll('.token')].map((t, i) => [i, +t.style.getPropertyValue('--weight')])"
        ".sort((a, b) => b[1] - a[1])[0][0]"
    )
    assert marked == weights.index(max(weights))
    prompt = view.playground.sample(128, 50, 0)
    with nw.observe(view.playground.subject) as seen:
        encoded = view.playground.encode(prompt)
        view.playground.subject.generate([prompt.text], spans=[encoded.spans], max_new_tokens=12, stop=["."])
    shares = [round(100 * row.needle_mass) for row in seen.table()]
    labels = page.evaluate("[...document.querySelectorAll('.heat')].map(cell => cell.getAttribute('aria-label'))")
    found = [float(label.split(": ")[1].split(" %")[0]) for label in labels]
    assert found == pytest.approx(shares, abs=1)


def test_the_keyboard_reaches_everything(visit: Any) -> None:
    view = visit()
    page = view.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    stops = page.evaluate("[...document.querySelectorAll('.layers [role=switch]')].filter(e => e.tabIndex === 0).length")
    assert stops == 1
    page.locator(".layers [role=switch][tabindex='0']").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    name = page.evaluate("document.activeElement.getAttribute('aria-label')")
    page.keyboard.press("Space")
    assert view.text != "none"
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == name
    view.check()
    page.keyboard.press("Enter")
    assert view.text == "none"
    page.locator("#story-no-heads").focus()
    page.keyboard.press("Enter")
    assert view.text == "ablate_attention()"
    assert page.evaluate("document.activeElement.id") == "story-no-heads"
    page.get_by_label("Heads kept in each layer").focus()
    page.keyboard.press("ArrowLeft")
    assert "keep_heads(k=9)" in view.text
    view.settle()
    focusable = "a[href], button, input, select, textarea, summary"
    reached = set()
    page.locator("#theme").focus()
    for _ in range(60):
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.closest('[id]')?.id"))
        page.keyboard.press("Tab")
    assert page.locator(focusable).count() > 40
    assert {"undo", "reset", "copy", "text", "layers-view", "answer-view", "prompt-view"} <= reached


def test_everything_has_a_name(visit: Any) -> None:
    view = visit()
    nameless = view.page.evaluate(
        """[...document.querySelectorAll('button, input, select, textarea, [role=switch], [role=group]')].filter(e => {
             const label = e.id && document.querySelector(`label[for="${e.id}"]`);
             return !(e.getAttribute('aria-label') || e.textContent.trim() || label || e.closest('label') || e.title
                      || e.getAttribute('aria-labelledby'));
           }).map(e => e.outerHTML.slice(0, 120))"""
    )
    assert nameless == []
    ids = view.page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_runs_over_the_edge(visit: Any, width: int) -> None:
    view = visit("#do=keep_heads(k=2)", viewport={"width": width, "height": 844})
    assert view.page.evaluate("document.documentElement.scrollWidth") <= width
    view.page.locator("#copy").click()
    box = view.page.locator("#code").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width


def test_dark_mode_by_system_and_by_button(visit: Any) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    view = visit(color_scheme="dark")
    dark = view.page.evaluate(paper)
    light = visit(color_scheme="light").page.evaluate(paper)
    assert dark != light
    view.page.locator("#theme").click()  # auto -> dark
    view.page.locator("#theme").click()  # dark -> light
    assert view.page.evaluate(paper) == light


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_their_ground(visit: Any, scheme: str) -> None:
    """WCAG's 4.5 for text, by the colours of the style sheet."""
    view = visit(color_scheme=scheme)
    inks = {"paper": ("ink", "accent"), "card": ("soft", "attention", "recurrent", "memory")}
    inks |= {"yes-bg": ("yes",), "no-bg": ("no",), "warn-bg": ("warn",), "attention-soft": ("ink",), "recurrent-soft": ("ink",)}

    def luminance(name: str) -> float:
        return _luminance(view.page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}')"))

    for ground, ink in ((ground, ink) for ground, some in inks.items() for ink in some):
        first, second = luminance(ink), luminance(ground)
        assert (max(first, second) + 0.05) / (min(first, second) + 0.05) >= 4.5, (ink, ground)


def _luminance(colour: str) -> float:
    parts = [int(colour.strip()[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_two_tabs_do_not_disturb_each_other(visit: Any) -> None:
    one, two = visit(), visit()
    one.page.locator("#story-no-heads").click()
    two.page.locator("#story-swapped").click()
    one.check()
    two.check()
    assert (one.text, two.text) == ("ablate_attention()", "swap_memory(half='kv')")


def test_of_many_changes_the_last_one_is_shown(visit: Any) -> None:
    view = visit()
    slider = view.page.get_by_label("Heads kept in each layer")
    for k in (9, 3, 7, 1, 8, 0, 4):
        slider.fill(str(k))
    assert view.text == "keep_heads(k=4)"
    view.check()


def test_a_server_that_stops_is_told_and_nothing_is_lost(chromium: Any, griffin: Playground, start_server: Any) -> None:
    served = start_server(griffin)
    page = chromium.new_page()
    page.goto(served.address)
    view = View(page, griffin)
    view.settle()
    served.stop()
    switch(view, "layer 2, head 1").click()
    page.wait_for_selector("#answer-view .trouble:not([hidden])")
    assert "The server does not answer" in page.locator("#answer-view .trouble").inner_text()
    assert view.text == "ablate_heads(heads=[[2, 1]])"
    page.locator("#reset").click()  # kept answers are still there
    view.settle()
    assert page.locator("#answer-view .trouble").is_hidden()
    page.close()


def test_the_texts_of_the_browser_are_those_of_python(visit: Any) -> None:
    view = visit()
    texts = [
        "none",
        "keep_heads(phase='decode', layers=[2], k=0, by='random', seed=3)",
        "keep_heads(k=1, by=ranking('2.0 5.3'))",
        "ablate_attention(layers=[2, 5], site='block')",
        "ablate_recurrent(site='conv') + ablate_recurrent(site='state')",
        "ablate_recurrent_groups(phase='decode', groups=[[0, 1], [3, 9]])",
        "expose_tokens(phase='decode', mode='omit', renormalize=True) + expose_tokens(phase='prefill', mode='only')",
        "limit_context(tokens=16, sinks=1) + swap_memory(half='kv') + swap_memory(half='recurrent')",
    ]
    for text in texts:
        canonical = str(nw.parse(text))
        parts, again = view.page.evaluate(
            """async text => {
                const m = await import('play/intervention.js');
                const parts = m.partsOf(text);
                return [parts, m.textOf(parts)];
            }""",
            text,
        )
        assert again == canonical
        assert parts == parts_of(text)


def test_an_exported_page_answers_what_was_recorded_and_says_what_was_not(visit: Any, tmp_path: Path) -> None:
    playground = Playground(nw.load("tiny-lfm"), "tiny-lfm")
    size = export(playground, tmp_path / "lfm.html", report="report.html")
    assert size == (tmp_path / "lfm.html").stat().st_size < 8 * 2**20
    page = (tmp_path / "lfm.html").as_uri()
    view = visit(page, playground)
    assert view.page.locator("#report").get_attribute("href") == "report.html"
    for story in stories(playground.anatomy):
        button = view.page.locator(f"#story-{story.id}")
        assert (button.get_attribute("aria-disabled") == "true") == bool(story.missing)
        if not story.missing:
            button.click()
            view.check()
            view.wait("playground.attention?.needle.length > 0")
    view.page.locator("#reset").click()
    heads = view.page.locator(".row.attention .cell")
    heads.first.click()
    view.check()
    second = heads.nth(1)
    assert second.get_attribute("aria-disabled") == "true"
    before = view.text
    second.dispatch_event("click")
    assert view.text == before
    assert "Not recorded in this page" in view.page.locator("#text-trouble").inner_text()
    view.page.locator("#reset").click()
    view.page.get_by_label("Heads kept in each layer").fill("1")
    view.page.get_by_label("Chosen by").select_option("random")
    view.check()
    assert view.page.locator("#prompt-needle").is_disabled()


def test_an_address_with_a_typed_prompt_is_read_back(visit: Any) -> None:
    prompt = visit().playground.sample(64, 0, 4).model_dump(mode="json") | {"label": ""}
    view = visit("#" + urllib.parse.urlencode({"prompt": json.dumps(prompt), "do": "keep_heads(k=1)"}))
    assert view.page.evaluate("playground.state.prompt") == prompt
    assert view.text == "keep_heads(k=1)"
    view.check()


@pytest.mark.parametrize("name", ["tiny-mamba", "tiny-transformer"])
def test_a_model_with_one_side_has_a_page_that_says_what_is_missing(visit: Any, start_server: Any, name: str) -> None:
    playground = Playground(nw.load(name), name)
    served = start_server(playground)
    view = visit(served.address, playground)
    view.check()
    for story in stories(playground.anatomy):
        button = view.page.locator(f"#story-{story.id}")
        assert (button.get_attribute("aria-disabled") == "true") == bool(story.missing)
        if story.missing:
            button.dispatch_event("click")
            assert view.page.locator("#text-trouble").inner_text() == story.missing
    assert view.page.locator(".row.attention").count() == len(playground.anatomy.attention_layers)
    view.page.locator(".side").first.click()
    view.check()
    if name == "tiny-mamba":
        assert "no attention" in view.page.locator("#controls-view").inner_text()
        view.page.locator("#text").fill("keep_heads(k=1)")
        view.page.locator("#text").press("Enter")
        view.page.wait_for_selector("#answer-view .trouble:not([hidden])")
        assert "has no separate attention layers" in view.page.locator("#answer-view .trouble").inner_text()
    served.stop()
