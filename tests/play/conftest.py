"""A served playground of tiny-griffin, and Chromium to open it in."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn

import needlework as nw
from needlework.play.playground import Playground
from needlework.play.server import App, open_socket

CHROMIUM = shutil.which("chromium")
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@dataclass
class Served:
    """A running server."""

    playground: Playground
    app: App
    port: int
    server: uvicorn.Server
    thread: threading.Thread

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/{self.app.token}/"

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)


def serve(playground: Playground, warm_up: bool = False) -> Served:
    listening = open_socket(0)
    app = App(playground, warm_up=warm_up)
    port = listening.getsockname()[1]
    app.listen_as(port)
    config = uvicorn.Config(app.asgi, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    return Served(playground, app, port, server, thread)


@pytest.fixture
def start_server() -> Callable[..., Served]:
    return serve


@pytest.fixture(scope="session")
def griffin() -> Playground:
    return Playground(nw.load("tiny-griffin"), "tiny-griffin")


@pytest.fixture(scope="session")
def served(griffin: Playground) -> Iterator[Served]:
    served = serve(griffin)
    yield served
    served.stop()


@pytest.fixture(scope="module")  # its event loop would be in the way of other modules
def chromium() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: `make test` installs it where it can")
    sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright here: `make test` installs it")
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield browser
        browser.close()
