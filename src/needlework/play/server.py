"""The server of the page: static files and one JSON call per provider method, for browsers on this machine only.

It listens on loopback. Every path begins with a random token, which only the page's own address holds. Requests whose Host is not
this server, or whose Origin is another page, are refused, so that no other site in the same browser can ask, by whatever
name it resolves (DNS rebinding). Bodies are limited before they are read, and the content security policy of the page allows
connections to this server only.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import socket
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from importlib import resources
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from needlework.errors import NeedleworkError, short_repr
from needlework.play.page import MODULES, served_page
from needlework.play.playground import Playground
from needlework.play.state import read_request

LOOPBACK = "127.0.0.1"
MOST_BYTES = 512 * 1024  # of a request's body
QUICK = ("describe", "stories", "sample")  # methods that do not run the model, and need not wait for it
MEDIA = {"js": "text/javascript", "css": "text/css", "json": "application/json", "svg": "image/svg+xml"}
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
T = TypeVar("T")
logger = logging.getLogger("needlework")


class Superseded(Exception):
    """A newer request of the same tab came before this one was begun."""


class LatestOnly:
    """Runs one job at a time, in one thread; of each name, only the newest waiting job is run."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "needlework-play")
        self._free = asyncio.Lock()
        self._newest: dict[str, object] = {}

    async def run(self, name: str, job: Callable[[], T], gone: Callable[[], Awaitable[bool]]) -> T:
        """Return the job's result.

        Args:
            name: The tab and the method, such as "k3f8/generate".
            gone: Whether the browser has given up waiting.

        Raises:
            Superseded: A newer job of this name waits, or the browser gave up; the job was not begun.
        """
        mine = self._newest[name] = object()
        try:
            async with self._free:
                if self._newest.get(name) is not mine or await gone():
                    raise Superseded
                return await asyncio.get_running_loop().run_in_executor(self._thread, job)
        finally:
            if self._newest.get(name) is mine:
                del self._newest[name]


class App:
    """The web application of one model.

    Args:
        token: Of the page's address; by default a random one.
        warm_up: Whether to answer the tour in the background, once the server has started.
    """

    def __init__(self, playground: Playground, token: str | None = None, warm_up: bool = False) -> None:
        self.playground = playground
        self.token = token or secrets.token_urlsafe(16)
        self.hosts: frozenset[str] = frozenset()  # values of Host that are this server; set once the port is known
        self._jobs = LatestOnly()
        self._methods: dict[str, Callable[[dict[str, Any]], Any]] = {
            "describe": lambda _: playground.describe(),
            "stories": lambda _: playground.stories(),
            "sample": self._sample,
            "ranking": lambda body: playground.ranking(str(body.get("name"))),
            "generate": lambda body: playground.generate(read_request(body.get("request"))),
            "attention": lambda body: playground.attention(read_request(body.get("request")), _whole(body.get("token"))),
        }
        self.asgi = Starlette(
            routes=[
                Route("/{token}/", self._page),
                Route("/{token}/static/{name}", self._static),
                Route("/{token}/api/{method}", self._call, methods=["POST"]),
            ],
            exception_handlers={404: _not_here, 405: _not_here},
            lifespan=self._warmed_up if warm_up else None,
        )

    def listen_as(self, port: int) -> None:
        """Accept requests whose Host is loopback at this port."""
        self.hosts = frozenset(f"{name}:{port}" for name in (LOOPBACK, "localhost"))

    @asynccontextmanager
    async def _warmed_up(self, _: Starlette) -> AsyncIterator[None]:
        """Start the warm-up, and end it with the server."""
        task = asyncio.create_task(self._warm_up())
        yield
        task.cancel()

    async def _warm_up(self) -> None:
        """Answer the tour on the first prompt, so that kernels are compiled. The page's calls come between two states."""

        async def given_up() -> bool:
            return False

        try:
            for state in self.playground.tour(self.playground.sample(**self.playground.first_draw)):
                await self._jobs.run("warm-up", partial(self.playground.generate, state), given_up)
        except Exception:
            logger.exception("play: the warm-up failed")

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that does not come from this server's own page; None if it does."""
        if request.headers.get("host") not in self.hosts:
            return _error(421, "this server answers on loopback only; open the address that `needlework play` printed")
        if not hmac.compare_digest(request.path_params["token"].encode(), self.token.encode()):
            return _error(403, "the address has a wrong token; open the address that `needlework play` printed")
        origin = request.headers.get("origin")
        own = {f"http://{host}" for host in self.hosts}
        if (request.method == "POST" and origin not in own) or (origin is not None and origin not in own):
            return _error(403, "only the page of this server may ask")
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return _error(403, "only the page of this server may ask")
        return None

    async def _page(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        nonce = secrets.token_urlsafe(12)
        policy = (
            f"default-src 'none'; script-src 'self' 'nonce-{nonce}'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
            " frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
        )
        return Response(
            served_page(self.playground.name, nonce),
            media_type="text/html",
            headers=HEADERS | {"Content-Security-Policy": policy},
        )

    async def _static(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        name = request.path_params["name"]
        if name not in MODULES and name not in ("style.css", "intervention.schema.json"):
            return _error(404, "there is no such file")
        content = resources.files("needlework.play").joinpath("static", name).read_bytes()
        return Response(content, media_type=MEDIA[name.rpartition(".")[2]], headers=HEADERS)

    async def _call(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        called = request.path_params["method"]
        method = self._methods.get(called)
        if method is None:
            return _error(404, "there is no such call")
        try:
            body = await _body(request)
        except NeedleworkError as error:
            return _error(413, str(error))
        if body is None:
            return _error(400, "the body is no JSON object")
        name = f"{str(body.get('tab', ''))[:64]}/{called}"
        try:
            job = partial(method, body)
            result = job() if called in QUICK else await self._jobs.run(name, job, request.is_disconnected)
            return JSONResponse(result, headers=HEADERS)
        except Superseded:
            return _error(409, "superseded by a newer request")
        except NeedleworkError as error:
            return _error(400, str(error))
        except MemoryError as error:
            return _error(507, f"out of memory: {error or 'choose a shorter prompt'}")
        except Exception:
            logger.exception("play: %s failed", called)
            return _error(500, "the server failed; its terminal says how")

    def _sample(self, body: dict[str, Any]) -> dict[str, Any]:
        drawn = self.playground.sample(*(_whole(body.get(key)) for key in ("length", "depth", "seed")))
        return drawn.model_dump(mode="json")


def open_socket(port: int) -> socket.socket:
    """Return a listening socket on loopback; port 0 takes any free one.

    Raises:
        NeedleworkError: The port is in use.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((LOOPBACK, port))
        listening.listen(64)
    except OSError as error:
        listening.close()
        raise NeedleworkError(
            f"port {port} on {LOOPBACK} cannot be used ({error.strerror}); choose another one, or --port 0 for any that is free"
        ) from None
    return listening


def serve(playground: Playground, listening: socket.socket, announce: Callable[[str], None], browser: bool = True) -> None:
    """Serve the page until the process is stopped.

    Args:
        announce: Called with the address of the page, its token included, once it can be opened.
        browser: Open the address in the user's browser.
    """
    playground.sample(**playground.first_draw)  # a model that it cannot be drawn for is refused before the page opens
    app = App(playground, warm_up=True)
    port = listening.getsockname()[1]
    app.listen_as(port)
    address = f"http://{LOOPBACK}:{port}/{app.token}/"
    # No access log: its lines would hold the token.
    config = uvicorn.Config(app.asgi, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=2)
    announce(address)
    if browser:
        webbrowser.open(address)
    uvicorn.Server(config).run(sockets=[listening])


async def _body(request: Request) -> dict[str, Any] | None:
    """Return the JSON object of a request's body, or None if it is none.

    Raises:
        NeedleworkError: The body is larger than MOST_BYTES; the rest of it is not read.
    """
    too_large = NeedleworkError(f"the request is larger than {MOST_BYTES // 1024} KiB; shorten the prompt")
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return None
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > MOST_BYTES:
        raise too_large
    content = b""
    async for chunk in request.stream():
        content += chunk
        if len(content) > MOST_BYTES:
            raise too_large
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise NeedleworkError(f"expected a whole number, got {short_repr(value)}")
    return value


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status, headers=HEADERS)


async def _not_here(request: Request, error: Exception) -> Response:
    return _error(404, "there is nothing here; open the address that `needlework play` printed")
