"""A headless Chromium driven by the DevTools protocol, a scheduler in this process, and made-up snapshots."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tornado.httpclient import AsyncHTTPClient
from tornado.websocket import WebSocketClientConnection, websocket_connect

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ADDRESS_LINE = re.compile(rb"DevTools listening on ws://([^/]+)/")
GUARD_S = 60.0
"""Longest a page may take before a test is failed instead of hanging; nothing is measured by it."""

# Every element of a page, those inside shadow roots included: Bokeh draws each of its models in one.
DEEP_QUERY = """
globalThis.deepQuery = (selector, root = document) => {
  const found = [...root.querySelectorAll(selector)];
  for (const element of root.querySelectorAll('*'))
    if (element.shadowRoot) found.push(...deepQuery(selector, element.shadowRoot));
  return found;
};
globalThis.modelNamed = (name) => Bokeh.documents[0].get_model_by_name(name);
"""


class Page:
    """One tab: JavaScript goes in, values come out."""

    def __init__(self, socket: WebSocketClientConnection) -> None:
        self._socket = socket
        self._sent = 0
        self.exceptions: list[str] = []
        self.complaints: list[str] = []  # of the console and the browser's log, warnings and errors
        self.requests: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Result of one DevTools command; JavaScript exceptions met meanwhile are kept in ``exceptions``."""
        self._sent += 1
        await self._socket.write_message(json.dumps({"id": self._sent, "method": method, "params": params}))
        while True:
            raw = await self._socket.read_message()
            assert raw is not None, f"Chromium closed the tab during {method}"
            answer = json.loads(raw)
            if answer.get("method") == "Runtime.exceptionThrown":
                self.exceptions.append(json.dumps(answer["params"]["exceptionDetails"])[:600])
            self._note(answer)
            if answer.get("id") == self._sent:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _note(self, message: dict[str, Any]) -> None:
        """Keep what the page requests and complains of."""
        match message.get("method"), message.get("params"):
            case "Network.requestWillBeSent", {"request": {"url": url}}:
                self.requests.append(url)
            case "Runtime.consoleAPICalled", {"type": "error" | "warning" | "assert", "args": args}:
                self.complaints.append(json.dumps(args)[:600])
            case "Log.entryAdded", {"entry": {"level": "error" | "warning", "text": text}}:
                self.complaints.append(text)

    async def scheme(self, name: str) -> None:
        """Prefer the colour scheme ``light`` or ``dark``."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.addScriptToEvaluateOnNewDocument", source=DEEP_QUERY)
        await self.call("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        """JSON value of an expression; a promise is awaited in the page."""
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, condition: str) -> Any:
        """Value of a JavaScript expression once it is truthy; asked anew every 20 ms in the page, across loads."""
        waiting = (
            "new Promise(resolve => { const ask = () => {"
            " let value; try { value = CONDITION } catch (_) { value = null }"
            " if (value) resolve(value); else setTimeout(ask, 20) }; ask() })"
        ).replace("CONDITION", f"({condition})")

        async def ask() -> Any:
            while True:
                answer = await self.call("Runtime.evaluate", expression=waiting, awaitPromise=True, returnByValue=True)
                if "exceptionDetails" not in answer:  # otherwise the page was replaced while we waited in it
                    return answer["result"].get("value")

        try:
            return await asyncio.wait_for(ask(), GUARD_S)
        except TimeoutError:
            raise AssertionError(f"never became true: {condition}; JavaScript exceptions: {self.exceptions}") from None

    async def shown(self, name: str) -> str:
        """Text of the element that carries ``data-libra=name``, as rendered."""
        return await self.until(f"deepQuery('[data-libra=\"{name}\"]')[0].innerText")

    async def columns(self, name: str) -> dict[str, list[Any]]:
        """Data of the named column data source, as the browser holds it."""
        return await self.evaluate(
            f"Object.fromEntries([...Object.entries(modelNamed('{name}').data)].map(([k, v]) => [k, Array.from(v)]))"
        )

    async def screenshot(self) -> bytes:
        """PNG of the window."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])


@contextlib.asynccontextmanager
async def open_page(executable: str, profile: Path, url: str) -> AsyncIterator[Page]:
    """A fresh Chromium with one tab at ``url``; the whole browser is gone afterwards."""
    process = await asyncio.create_subprocess_exec(
        executable, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
        f"--user-data-dir={profile}", "--remote-debugging-port=0", "--remote-debugging-address=127.0.0.1",
        "--window-size=1400,820", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    drain: asyncio.Task[bytes] | None = None
    try:
        # Chromium says its address before it writes the file DevToolsActivePort, so the line is what can be awaited.
        while not (found := ADDRESS_LINE.search(await asyncio.wait_for(process.stderr.readline(), GUARD_S))):
            assert not process.stderr.at_eof(), "Chromium ended before it opened its DevTools port"
        drain = asyncio.ensure_future(process.stderr.read())
        tabs = json.loads((await AsyncHTTPClient().fetch(f"http://{found[1].decode()}/json/list")).body)
        tab = next(tab for tab in tabs if tab["type"] == "page")
        socket = await websocket_connect(tab["webSocketDebuggerUrl"], max_message_size=64 * 2**20)
        try:
            page = Page(socket)
            await page.open(url)
            yield page
        finally:
            socket.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if drain is not None:
            await drain


@pytest.fixture
def chromium(tmp_path: Path) -> Callable[[str], contextlib.AbstractAsyncContextManager[Page]]:
    """Opens a URL in a new browser: ``async with chromium(url) as page``. Skips where there is no Chromium."""
    executable = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    if executable is None:
        pytest.skip(f"no Chromium on PATH (looked for {', '.join(CHROMIUM_NAMES)}): apt-get install chromium")
    count = iter(range(1000))
    return lambda url: open_page(executable, tmp_path / f"profile-{next(count)}", url)


@pytest.fixture
def live_scheduler() -> Callable[..., contextlib.AbstractAsyncContextManager[Any]]:
    """Opens a scheduler on this event loop, its dashboard at a free port: ``async with live_scheduler()``."""
    from distributed import Scheduler

    def start(**kwargs: Any) -> Any:
        return Scheduler(**{"host": "127.0.0.1", "port": 0, "dashboard_address": "127.0.0.1:0", **kwargs})

    return start


@pytest.fixture
def make_snapshot() -> Callable[..., dict[str, Any]]:
    """A snapshot of a run in its fourth iteration of six; keyword arguments replace entries."""

    def make(**changes: Any) -> dict[str, Any]:
        def row(i: int) -> tuple[float, ...]:
            queued = max(0, 40 - i // 2)
            return (0.5 * i, queued, i % 7, min(16, i), 1 + i % 4, 37 * i, 0, queued // 2, queued - queued // 2, 0, 0)

        history = [row(i) for i in range(120)]
        return {
            "run": "demo", "epoch": 1, "uptime_s": 60.0, "eta": 1, "iterations": 6, "iteration": 3,
            "state": "running", "left_s": 95.5, "evaluations": [[0, 0.25, 64], [2, 0.5, 64]],
            "steps": [[0, {"trajectories": 9.0, "training": 1.5}], [1, {"trajectories": 6.0, "training": 1.5, "moving": 0.5}]],
            "decisions": [[42.5, "iteration 3 may generate", "version 3 >= 3 - eta 1"]],
            "versions": {"published": 3, "served": {"rollout-0": 3, "rollout-1": 2}},
            "slots": {"ROLLOUT": {"used": 14, "total": 16}, "TOOL": {"used": 3, "total": 8}},
            "queue": {"ROLLOUT": {0: 21, 1: 9, 3: 2}, "TOOL": {0: 5}},
            "buckets": [
                {"bucket": "tp1", "engines": 2, "used": 8, "slots": 8, "at_home": 19, "waiting": 11, "left_tokens": 310},
                {"bucket": "tp4", "engines": 1, "used": 6, "slots": 8, "at_home": 9, "waiting": 3, "left_tokens": 2210},
                {"bucket": None, "engines": 0, "used": 0, "slots": 0, "at_home": 0, "waiting": 18, "left_tokens": 0},
            ],
            "policy": {
                "name": "cmlfq", "objective": "makespan", "skill": 0.214, "weights": {"joint": 0.41, "totals": 0.0},
                "outcomes": [[500, 800, 900], [510, 300, 250], [0, 40, 70]],
            },
            "quanta": {"ROLLOUT": 1517, "TOOL": 1203}, "parts": 0, "tokens": 4403, "groups": 23,
            "failures": {"none": 180, "tool": 3, "worker": 1},
            "rewards": [[0, 0.28125], [1, 0.40625], [2, 0.5625]], "lag": [[0, 0.0], [1, 0.5], [2, 0.75]],
            "history": history, "roles": [], "not_ready": [],
            "time": {
                "until_s": 60.0, "busy_frac": 0.625, "now_busy_frac": 0.75,
                "shares": {"generating": 0.5, "training": 0.125, "tail": 0.375},
                "now_shares": {"generating": 0.75, "tail": 0.25},
                "workers": [
                    {"worker": "rollout-0", "kind": "engine", "state": "tail", "busy_frac": 0.5, "slots_used_frac": 0.25,
                     "seconds": {"generating": 30.0, "tail": 30.0}}
                ],
            },
        } | changes  # fmt: skip

    return make


@pytest.fixture(scope="session")
def recorded_run(tmp_path_factory: pytest.TempPathFactory, random_model: Path, client: Any) -> Path:
    """The directory of a short run that has finished: two iterations, held-out questions, tools. Read it only."""
    from libra.config import config_from_dict
    from libra.driver.session import run

    directory = tmp_path_factory.mktemp("recorded")
    config = config_from_dict(
        {
            "run": {"name": "recorded", "dir": str(directory), "iterations": 2},
            "model": {"path": str(random_model)},
            "environment": {"name": "libra.testing:FixedTurns"},
            "rollout": {"max_new_tokens": 4, "max_turns": 3, "ignore_eos": True, "slots": 8},
            "trainer": {"prompts": 2, "group_size": 2, "lr": 1e-3},
            "evaluation": {"prompts": 4},
            "cluster": {"threads": 1, "dashboard_port": 0},
            "observe": {"progress": False},
        }
    )
    return run(config, client=client).directory
