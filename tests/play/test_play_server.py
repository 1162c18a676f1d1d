"""The server: who may ask, what is too large, what is dropped, and that it stays up."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

import pytest
from typer.testing import CliRunner

from needlework.cli import app
from needlework.play.playground import Playground
from needlework.play.server import MOST_BYTES, LatestOnly, Superseded
from needlework.play.state import RequestState

OWN = {"Content-Type": "application/json"}


def call(
    served: Any, path: str, body: Any = None, headers: Mapping[str, str] | None = None, token: str | None = None
) -> tuple[int, Any]:
    """Send one request, as the page would unless headers say otherwise, and return status and content."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    origin = {"Origin": f"http://127.0.0.1:{served.port}"} if body is not None else {}
    sent = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    where = f"/{served.app.token if token is None else token}/{path}"
    given = {**(OWN if body is not None else {}), **origin, **(headers or {})}
    connection.request("GET" if body is None else "POST", where, sent, {k: v for k, v in given.items() if v})
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer.status, json.loads(content) if answer.headers["Content-Type"] == "application/json" else content


def test_the_page_and_its_modules_are_served_with_a_strict_policy(served: Any) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.request("GET", f"/{served.app.token}/")
    answer = connection.getresponse()
    page = answer.read().decode()
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "connect-src 'self'" in policy
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "tiny-griffin" in page
    assert "http" not in page.replace("http-equiv", ""), "nothing comes from elsewhere"
    for name in ("app.js", "provider.js", "style.css", "intervention.schema.json"):
        assert call(served, f"static/{name}")[0] == 200
    for name in ("page.html", "secrets.txt", "..%2Fserver.py", "../server.py"):
        assert call(served, f"static/{name}")[0] in (403, 404)


@pytest.mark.parametrize(
    ("path", "headers", "token", "status"),
    [
        ("", {}, "wrong", 403),
        ("api/describe", {}, "wrong", 403),
        ("static/app.js", {}, "", 404),
        ("api/describe", {"Host": "evil.example"}, None, 421),
        ("api/describe", {"Host": "evil.example:8765"}, None, 421),
        ("api/describe", {"Origin": "http://evil.example"}, None, 403),
        ("api/describe", {"Origin": "null"}, None, 403),
        ("api/describe", {"Origin": ""}, None, 403),
        ("api/describe", {"Sec-Fetch-Site": "cross-site"}, None, 403),
        ("api/describe", {"Content-Type": "text/plain"}, None, 400),
        ("api/nothing", {}, None, 404),
    ],
)
def test_others_are_refused(served: Any, path: str, headers: dict[str, str], token: str | None, status: int) -> None:
    body = {} if path.startswith("api") else None
    found, content = call(served, path, body, headers, token)
    assert found == status
    assert served.app.token not in str(content)
    assert "griffin" not in str(content)
    assert call(served, "api/describe", {})[0] == 200


def test_a_call_needs_post(served: Any) -> None:
    assert call(served, "api/describe")[0] == 404


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"3", b"\xff\xfe", b"[" * 100_000])
def test_bodies_that_are_no_object_are_refused(served: Any, body: bytes) -> None:
    assert call(served, "api/generate", body)[0] == 400


@pytest.mark.parametrize(
    ("method", "body", "said"),
    [
        ("generate", {}, "Input should be"),
        ("generate", {"request": {"prompt": {"before": "nonsense"}}}, "toy language without the words 'nonsense'"),
        ("generate", {"request": {"prompt": {}}}, "the prompt is empty"),
        ("generate", {"request": {"prompt": {"before": "a"}, "parts": [{"name": "x"}]}}, "the page has no part 'x'"),
        ("generate", {"request": {"prompt": {"before": "the " * 60_000}}}, "at most 200000 characters"),
        ("attention", {"request": {"prompt": {"before": "the king"}}, "token": "1"}, "expected a whole number"),
        ("sample", {"length": 3, "depth": 0, "seed": 0}, "prompts are drawn with"),
        ("sample", {"length": True, "depth": 0, "seed": 0}, "expected a whole number"),
        ("ranking", {"name": "x"}, "not ranked by 'x'"),
    ],
)
def test_bad_requests_are_answered_with_a_reason(served: Any, method: str, body: dict[str, Any], said: str) -> None:
    status, content = call(served, f"api/{method}", body)
    assert status == 400
    assert said in content["error"]
    assert "Traceback" not in content["error"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_megabyte_is_refused_before_it_is_read(served: Any, chunked: bool) -> None:
    content = json.dumps({"request": {"prompt": {"before": "a " * 2**20}}}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    headers = {**OWN, "Origin": f"http://127.0.0.1:{served.port}"}
    path = f"/{served.app.token}/api/generate"
    try:
        if chunked:
            parts = (content[i : i + 65536] for i in range(0, len(content), 65536))
            connection.request("POST", path, parts, headers, encode_chunked=True)
        else:
            connection.request("POST", path, content, headers)
        answer = connection.getresponse()
        assert answer.status == 413
        assert f"larger than {MOST_BYTES // 1024} KiB" in answer.read().decode()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the server closed the connection while the rest was still being sent
    assert call(served, "api/describe", {})[0] == 200


def test_of_one_tab_only_the_newest_waiting_request_is_run() -> None:
    ran: list[str] = []
    hold = threading.Event()

    async def here() -> bool:
        return False

    async def all_of_them() -> list[Any]:
        jobs = LatestOnly()

        def job(name: str) -> str:
            hold.wait(10)
            ran.append(name)
            return name

        names = [("a", "first"), ("a", "dropped"), ("b", "other tab"), ("a", "newest")]
        waiting = []
        for tab, name in names:
            waiting.append(asyncio.ensure_future(jobs.run(tab, lambda name=name: job(name), here)))
            await asyncio.sleep(0.02)
        hold.set()
        return await asyncio.gather(*waiting, return_exceptions=True)

    results = asyncio.run(all_of_them())
    assert ran == ["first", "other tab", "newest"]
    assert isinstance(results[1], Superseded)


def test_requests_that_nobody_waits_for_are_not_run() -> None:
    async def gone() -> bool:
        return True

    with pytest.raises(Superseded):
        asyncio.run(LatestOnly().run("a", lambda: 1, gone))


def test_a_port_in_use_an_unknown_model_and_a_missing_extra_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CliRunner()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        shown = runner.invoke(app, ["play", "tiny-griffin", "--port", str(other.getsockname()[1]), "--no-open"])
    assert shown.exit_code == 2
    assert "cannot be used" in " ".join(shown.output.split())
    shown = runner.invoke(app, ["play", "tiny-grifin", "--port", "0", "--no-open"])
    assert shown.exit_code == 2
    assert "tiny-griffin" in shown.output
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "needlework.play.server")
    shown = runner.invoke(app, ["play"])
    assert shown.exit_code == 2
    assert "needlework[play]" in shown.output


def test_the_tour_is_answered_in_the_background(griffin: Any, start_server: Any) -> None:
    """Calls that need no model are answered meanwhile, and the first answer of the page is the first of the warm-up."""
    begun, hold, asked = threading.Event(), threading.Event(), list[str]()

    class Slow(Playground):
        def generate(self, request: RequestState) -> dict[str, Any]:
            begun.set()
            assert hold.wait(60)
            asked.append(str(request.intervention))
            return super().generate(request)

    slow = Slow(griffin.subject, "tiny-griffin")
    served = start_server(slow, warm_up=True)
    assert begun.wait(60)
    first = slow.first_draw
    assert call(served, "api/describe", {})[0] == 200
    status, prompt = call(served, "api/sample", first)
    assert status == 200
    hold.set()
    assert call(served, "api/generate", {"request": {"prompt": prompt, "parts": [], "max_new_tokens": 12}})[0] == 200
    while len(asked) < 9:
        time.sleep(0.01)
    served.stop()
    tour = [str(state.intervention) for state in slow.tour(slow.sample(**first))]
    assert asked[0] == "none"
    assert sorted(asked) == sorted(["none", *tour])
    assert asked.index("none", 1) <= 2, "the page's call came between two states"


@pytest.mark.slow
def test_the_command_serves_until_it_is_stopped() -> None:
    command = [sys.executable, "-m", "needlework", "play", "tiny-griffin", "--port", "0", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        address = re.fullmatch(r"tiny-griffin: (http://127\.0\.0\.1:\d+/[\w-]{20,}/)  \(Ctrl\+C stops\)\n", said)
        assert address, said
        with urllib.request.urlopen(address[1]) as page:  # while the warm-up runs
            assert "<h1>tiny-griffin</h1>" in page.read().decode()
        process.send_signal(signal.SIGINT)
        said, told = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "")
    assert "Traceback" not in told
    assert address[1] not in told


def test_an_unexpected_failure_shows_nothing_of_it(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("a secret of the machine")

    monkeypatch.setitem(served.app._methods, "describe", lambda _: fail())
    status, content = call(served, "api/describe", {})
    assert status == 500
    assert "secret" not in content["error"]


def test_concurrent_tabs_all_get_their_answers(served: Any) -> None:
    prompt = served.playground.sample(64, 50, 0).model_dump(mode="json")
    found: dict[str, Any] = {}

    def ask(tab: str, k: int) -> None:
        request = {"prompt": prompt, "parts": [{"name": "keep_heads", "k": k}], "max_new_tokens": 12}
        found[tab] = call(served, "api/generate", {"tab": tab, "request": request})

    threads = [threading.Thread(target=ask, args=(f"tab{k}", k)) for k in range(4)]
    for thread in threads:
        thread.start()
        time.sleep(0.01)
    for thread in threads:
        thread.join()
    assert {status for status, _ in found.values()} == {200}
    assert [found[f"tab{k}"][1]["intervention"] for k in range(4)] == [f"keep_heads(k={k})" for k in range(4)]
