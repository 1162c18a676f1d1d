"""The page in a real browser: clicks, keyboard, dark mode, phone, print, and answers that are markup."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import synthetic

from needlework.reports.page import write_report
from needlework.results import Store

CHROMIUM = shutil.which("chromium")
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: `make test` installs it where it can"),
]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright here: `make test` installs it")
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Any) -> Iterator[Any]:
    """Opens a page offline; any error in its script or any request to elsewhere fails the test."""
    troubles: list[str] = []
    pages = []

    def go(path: Path, **options: Any) -> Any:
        page = chromium.new_page(**options)
        pages.append(page)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: troubles.append(request.url) if not request.url.startswith("file:") else None)
        page.goto(path.as_uri())
        return page

    yield go
    for page in pages:
        page.close()
    assert troubles == []


def unfold(view: Any, name: str) -> Any:
    """Open a figure as a reader does, by its heading."""
    view.locator(f"#{name} > .part > summary").click()
    return view.locator(f"#{name}")


def test_the_page_as_opened_is_short_and_each_link_opens_its_part(visit: Any, page: Path) -> None:
    view = visit(page, viewport={"width": 1280, "height": 900})
    assert view.evaluate("document.documentElement.scrollHeight") < 14_900 / 3, "a third of what this run took before"
    assert view.locator("#heads svg").first.is_visible()
    assert not view.locator("#needles svg").first.is_visible()
    view.locator("nav a[href='#needles']").click()
    view.locator("#needles svg").first.wait_for(state="visible")
    assert not view.locator("#claim-few_heads").is_visible()
    view.locator(".overview a.chip[href='#claim-few_heads']").first.click()
    view.locator("#claim-few_heads").wait_for(state="visible")


def test_a_comparison_as_opened_is_short_and_no_label_is_cut(visit: Any, tmp_path: Path) -> None:
    runs = [synthetic.write(tmp_path / name, ("tiny-griffin",), per_cell=2) for name in ("a", "b")]
    store = Store(runs[1])
    store.set_meta("models", {"tiny-griffin": {**store.meta("models")["tiny-griffin"], "weights": "retrained"}})
    store.db.execute("UPDATE trials SET scores = json_set(scores, '$.correct', 0.0) WHERE rowid % 3 = 0 AND mode = 'generate'")
    store.close()
    path = write_report(runs, tmp_path / "out", runs[0], pictures=False).path
    view = visit(path, viewport={"width": 1280, "height": 900})
    assert view.evaluate("document.documentElement.scrollHeight") < 4_500, "it was 9,090 with every table and panel open"
    assert view.locator("#comparison table").first.is_visible()
    phone = visit(path, viewport={"width": 390, "height": 800})
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    cut = "[...document.querySelectorAll('.lines li')].filter(e => e.clientWidth > 1 && e.scrollWidth > e.clientWidth)"
    assert phone.evaluate(f"{cut}.map(e => e.innerText)") == []


def test_a_click_on_a_cell_shows_its_trials_with_the_needle_marked(visit: Any, page: Path) -> None:
    view = visit(page)
    cell = unfold(view, "needles").locator("[data-k]").first
    cell.click()
    dialog = view.locator("#trials")
    assert dialog.is_visible()
    assert "0 of 4 heads · 64 tokens, depth 0 %" in view.locator("#trials-title").inner_text()
    assert "All 2 trials, failures first (2 of 2 wrong)" in view.locator("#trials-count").inner_text()
    assert view.locator("#trials-list > li").count() == 2
    marked = view.locator("#trials-list mark").first.inner_text()
    assert marked.startswith("the code of ")
    assert marked.endswith(" .")
    view.locator("#close").click()
    assert not dialog.is_visible()


def test_filter_and_count_of_a_large_cell(visit: Any, page: Path) -> None:
    view = visit(page)
    view.locator("#heads [data-k]").nth(1).click()
    count = view.locator("#trials-count").inner_text()
    assert "Shown: 20 of " in count
    assert "failures first" in count
    chips = view.locator("#trials-list .chip").all_inner_texts()
    assert chips == sorted(chips, reverse=True)  # "wrong" before "right"
    wrong = chips.count("wrong")
    view.locator("#trials-filter [data-f=wrong]").click()
    assert view.locator("#trials-list > li").count() == wrong
    assert view.locator("#trials-filter [data-f=wrong]").get_attribute("aria-pressed") == "true"


def test_the_keyboard_reaches_everything(visit: Any, page: Path) -> None:
    view = visit(page)
    first = unfold(view, "exposure").locator("svg").first.locator("[data-k]").first
    first.focus()
    view.keyboard.press("ArrowRight")
    view.keyboard.press("ArrowDown")
    place = "[document.activeElement.dataset.r, document.activeElement.dataset.c]"
    assert view.evaluate(place) == ["1", "1"]
    view.keyboard.press("Enter")
    assert view.locator("#trials").is_visible()
    view.keyboard.press("Escape")
    assert not view.locator("#trials").is_visible()
    assert view.evaluate(place) == ["1", "1"]  # focus is back where it was
    count = "s => s.querySelectorAll('[tabindex=\"0\"]').length"
    stops = view.evaluate(f"[...document.querySelectorAll('#needles svg')].map({count})")
    assert set(stops) == {1}  # one tab stop for each map


def test_every_mark_has_a_name_and_every_figure_a_table(visit: Any, page: Path) -> None:
    view = visit(page)
    assert view.evaluate("[...document.querySelectorAll('[data-k]')].every(e => e.getAttribute('aria-label'))")
    assert view.evaluate("[...document.querySelectorAll('svg')].every(e => e.getAttribute('aria-label'))")
    figures = view.evaluate("[...document.querySelectorAll('section:not(#findings)')].filter(s => s.querySelector('svg')).length")
    tables = view.evaluate("[...document.querySelectorAll('section')].filter(s => s.querySelector('.numbers table')).length")
    assert figures == tables == 9


def test_dark_mode_by_system_and_by_button(visit: Any, page: Path) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    view = visit(page, color_scheme="dark")
    dark = view.evaluate(paper)
    light = visit(page, color_scheme="light").evaluate(paper)
    assert dark != light
    view.locator("#theme").click()  # auto -> dark
    view.locator("#theme").click()  # dark -> light
    assert view.evaluate(paper) == light
    view.reload()
    assert view.evaluate(paper) == light  # remembered


@pytest.mark.parametrize("width", [320, 390, 768])
def test_nothing_runs_over_the_edge_of_a_phone(visit: Any, page: Path, width: int) -> None:
    view = visit(page, viewport={"width": width, "height": 800})
    assert view.evaluate("document.documentElement.scrollWidth") <= width
    unfold(view, "needles").locator("[data-k]").first.click()
    box = view.locator("#trials").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width


def test_the_finding_fills_the_first_screen(visit: Any, page: Path) -> None:
    view = visit(page, viewport={"width": 1280, "height": 900})
    drawn = "[...document.querySelectorAll('.overview svg')].filter(s => s.getBoundingClientRect().bottom < innerHeight).length"
    assert view.evaluate(drawn) >= 8
    assert view.locator("#findings .overview").bounding_box()["y"] < 320
    lines = "s => [...document.querySelectorAll(s)].map(e => Math.round(e.getBoundingClientRect().top))"
    labels = view.evaluate(f"({lines})('.overview tbody tr:first-child th li')")
    strips = view.evaluate(
        "[...document.querySelectorAll('.overview tbody tr:first-child td svg')].map(s => s.getBoundingClientRect())"
    )
    assert all(abs(box["top"] - labels[0]) < 3 and abs(box["height"] - 19 * len(labels)) < 2 for box in strips), "line by line"


@pytest.mark.parametrize("width", [320, 390])
def test_on_a_phone_each_figure_has_its_own_words(visit: Any, page: Path, width: int) -> None:
    view = visit(page, viewport={"width": width, "height": 800})
    cell = view.locator(".overview td").first
    assert cell.locator(".who").is_visible()
    assert cell.locator(".lines li").first.is_visible()
    assert view.locator(".overview thead").is_hidden()
    assert view.evaluate("document.querySelector('.overview').scrollWidth") <= width


def test_the_finding_needs_no_script(chromium: Any, page: Path) -> None:
    context = chromium.new_context(java_script_enabled=False)
    view = context.new_page()
    view.goto(page.as_uri())
    assert view.locator(".overview svg").first.is_visible()
    view.locator("#sentences summary").click()
    assert view.locator(".claim").first.is_visible()
    assert view.locator("#heads svg").first.is_visible()
    view.locator("#heads .numbers summary").click()
    assert view.locator("#heads .numbers table").first.is_visible()
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_their_ground(visit: Any, page: Path, scheme: str) -> None:
    """WCAG's contrast of 4.5 for the words of verdicts, reasons and small figures."""
    view = visit(page, color_scheme=scheme)
    for what in (
        ".chip.supported",
        ".chip.not-supported",
        ".chip.inconclusive",
        ".why",
        ".overview .share",
        ".overview th .lines li",
    ):
        if view.locator(what).count():
            assert view.evaluate(CONTRAST, what) >= 4.5, what


CONTRAST = """selector => {
  const element = document.querySelector(selector), style = getComputedStyle(element);
  const numbers = text => text.match(/[\\d.]+/g).map(Number);
  let ground = element, back = numbers(style.backgroundColor);
  while (back.length > 3 && back[3] === 0) {
    ground = ground.parentElement;
    back = numbers(getComputedStyle(ground).backgroundColor);
  }
  const light = ([r, g, b]) => [r, g, b].map(c => c / 255).map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const [a, b] = [light(numbers(element.closest("svg") ? style.fill : style.color)), light(back)].sort((x, y) => y - x);
  return (a + .05) / (b + .05);
}"""


def test_printing_leaves_out_what_paper_cannot_do(visit: Any, page: Path) -> None:
    view = visit(page, color_scheme="dark")
    view.emulate_media(media="print")
    assert not view.locator("nav").is_visible()
    assert not view.locator("#theme").is_visible()
    assert view.locator("#heads svg").first.is_visible()
    assert view.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    view.set_viewport_size({"width": 717, "height": 1000})  # as wide as a sheet of paper
    assert view.evaluate("document.querySelector('.overview').getBoundingClientRect().right") <= 717


def test_markup_in_an_answer_is_shown_as_text(visit: Any, hostile: Path) -> None:
    view = visit(hostile)
    unfold(view, "needles").locator("[data-k]").first.click()
    shown = view.locator("#trials-list dd").nth(1).inner_text()
    assert shown.startswith("</script><script>window.pwned=1</script><img src=x")
    assert shown.endswith("&amp; end")
    assert view.evaluate("window.pwned") is None
    assert view.locator("#trials-list img, #trials-list script").count() == 0
