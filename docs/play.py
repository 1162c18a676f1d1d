"""Write the playground's screenshot (docs/play.png) and animation (docs/play.webp) with Chromium: python docs/play.py"""

from __future__ import annotations

import io
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import uvicorn
from PIL import Image
from playwright.sync_api import sync_playwright

import needlework as nw
from needlework.play.playground import Playground
from needlework.play.server import App, open_socket

DOCS = Path(__file__).parent
SIZE = {"width": 1280, "height": 900}
SHOWN = {"width": 1280, "height": 720}  # of the animation, which is written at two thirds of it
STEP, LAST = 1400, 2600  # milliseconds that a state is shown
BUSY = "Boolean(!globalThis.playground || document.querySelector('#answer-view.busy') || !playground.attention)"


def start(playground: Playground) -> tuple[uvicorn.Server, str]:
    """Serve a playground in a thread; return the server and the page's address."""
    listening = open_socket(0)
    app = App(playground)
    app.listen_as(listening.getsockname()[1])
    server = uvicorn.Server(uvicorn.Config(app.asgi, log_level="error", access_log=False))
    threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return server, f"http://127.0.0.1:{listening.getsockname()[1]}/{app.token}/"


def settle(page: Any) -> None:
    """Wait until the answer and its attention are shown."""
    page.wait_for_timeout(100)
    while page.evaluate(BUSY):
        page.wait_for_timeout(50)
    page.wait_for_timeout(300)


def states(page: Any) -> list[bytes]:
    """Walk through some states of the page and return a picture of each."""
    frames = []

    def shoot() -> None:
        settle(page)
        frames.append(page.screenshot())

    shoot()
    page.locator("#story-no-heads").click()
    shoot()
    page.locator("#story-few-heads").click()
    shoot()
    page.locator("#story-hidden-answering").click()
    shoot()
    page.locator("#story-swapped").click()
    shoot()
    page.locator("#reset").click()
    for head in range(0, 10, 2):
        page.get_by_role("switch", name=f"layer 2, head {head}", exact=True).click()
    shoot()
    page.get_by_role("switch", name="layer 2, all 10 heads", exact=True).click()
    shoot()
    return frames


def main() -> None:
    playground = Playground(nw.load("tiny-griffin"), "tiny-griffin")
    server, address = start(playground)
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=SIZE, color_scheme="light", device_scale_factor=1.25)
        for _ in range(2):  # the first answers of a process compile kernels
            playground.forget()
            page.goto(address + "#do=keep_heads(k%3D2)")
            page.reload()
            settle(page)
        page.screenshot(path=DOCS / "play.png")
        page = browser.new_page(viewport=SHOWN, color_scheme="light")
        page.goto(address)
        frames = states(page)
        browser.close()
    server.should_exit = True
    pictures = [Image.open(io.BytesIO(frame)).convert("RGB") for frame in frames]
    pictures = [
        picture.resize((picture.width * 3 // 4, picture.height * 3 // 4), Image.Resampling.LANCZOS) for picture in pictures
    ]
    times = [STEP] * (len(pictures) - 1) + [LAST]
    pictures[0].save(DOCS / "play.webp", save_all=True, append_images=pictures[1:], duration=times, loop=0, quality=80, method=6)
    Image.open(DOCS / "play.png").quantize(256).save(DOCS / "play.png", optimize=True)
    for name in ("play.png", "play.webp"):
        print(f"{name}: {(DOCS / name).stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
