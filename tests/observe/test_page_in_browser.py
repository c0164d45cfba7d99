"""`libra page` and the report of one run in a headless Chromium, against what the run's event log
says.

What is expected is worked out here from the lines of the log, by none of the functions that make
the pages.
"""

import asyncio
import base64
import contextlib
import json
import os
import re
import shutil
import signal

import pytest
from tornado.httpclient import AsyncHTTPClient
from tornado.websocket import websocket_connect

from libra.cli.records import page_server
from libra.hardware.gpus import load_prices
from libra.observe.report import write_report

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
EXECUTABLE = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
ADDRESS_LINE = re.compile(rb"DevTools listening on ws://([^/]+)/")
GUARD_S = 120.0
"""Longest a page may take before a test is failed instead of hanging; nothing is measured by it."""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium; type: apt-get install chromium"),
]

# Every element of a page, those inside shadow roots included: Bokeh draws each of its models in one.
DEEP_QUERY = """
globalThis.deepQuery = (selector, root = document) => {
  const found = [...root.querySelectorAll(selector)];
  for (const element of root.querySelectorAll('*'))
    if (element.shadowRoot) found.push(...deepQuery(selector, element.shadowRoot));
  return found;
};
globalThis.modelNamed = (name) => Bokeh.documents[0].get_model_by_name(name);
globalThis.alert = (text) => { globalThis.hit = text };
"""
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
FIRST = "deepQuery('.big [data-libra]').map(e => e.dataset.libra)"
CUT = "deepQuery('.states div').filter(e => e.scrollWidth > e.clientWidth).map(e => e.innerText)"
COVERED = """(() => { const b = document.getElementById('theme').getBoundingClientRect();
  return deepQuery('canvas').map(c => c.getBoundingClientRect()).filter(c => c.left < b.right && b.left < c.right
    && c.top < b.bottom && b.top < c.bottom).length ? ['a plot'] : []; })()"""
DRAWN = "deepQuery('canvas').filter(c => c.getBoundingClientRect().width > 100).length >= 5"


class Page:
    """One tab: JavaScript goes in, values come out."""

    def __init__(self, socket):
        self._socket = socket
        self._sent = 0
        self.exceptions = []
        self.requests = []

    async def call(self, method, **params):
        """Result of one DevTools command; exceptions and requests met meanwhile are kept."""
        self._sent += 1
        await self._socket.write_message(json.dumps({"id": self._sent, "method": method, "params": params}))
        while True:
            raw = await self._socket.read_message()
            assert raw is not None, f"Chromium closed the tab during {method}"
            answer = json.loads(raw)
            if answer.get("method") == "Runtime.exceptionThrown":
                self.exceptions.append(json.dumps(answer["params"]["exceptionDetails"])[:600])
            elif answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("id") == self._sent:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    async def evaluate(self, expression):
        """JSON value of an expression; a promise is awaited in the page."""
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, condition):
        """Value of a JavaScript expression once it is truthy; asked anew every 20 ms in the page, across loads."""
        waiting = (
            "new Promise(resolve => { const ask = () => {"
            " let value; try { value = CONDITION } catch (_) { value = null }"
            " if (value) resolve(value); else setTimeout(ask, 20) }; ask() })"
        ).replace("CONDITION", f"({condition})")

        async def ask():
            while True:
                answer = await self.call("Runtime.evaluate", expression=waiting, awaitPromise=True, returnByValue=True)
                if "exceptionDetails" not in answer:  # otherwise the page was replaced while we waited in it
                    return answer["result"].get("value")

        try:
            return await asyncio.wait_for(ask(), GUARD_S)
        except TimeoutError:
            raise AssertionError(f"never became true: {condition}; JavaScript exceptions: {self.exceptions}") from None

    async def shown(self, name):
        return await self.until(f"deepQuery('[data-libra=\"{name}\"]')[0].innerText")

    async def open(self, url, folder, name):
        """Open a page in both colour schemes, each checked; pictures to look at: pytest keeps the last three."""
        await self.call("Page.navigate", url=url)
        for scheme in ("light", "dark"):
            media = [{"name": "prefers-color-scheme", "value": scheme}]
            await self.call("Emulation.setEmulatedMedia", features=media)
            await self.until(f"document.documentElement.dataset.painted && ({DRAWN})")
            await self.until("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
            assert (number(await self.evaluate(BACKGROUND)) < 60) == (scheme == "dark"), name
            png = base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])
            (folder / f"{name}-{scheme}.png").write_bytes(png)
        assert self.exceptions == []


@contextlib.asynccontextmanager
async def chromium(profile):
    """A fresh Chromium with one empty tab; the whole browser is gone afterwards."""
    process = await asyncio.create_subprocess_exec(
        EXECUTABLE, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
        f"--user-data-dir={profile}", "--remote-debugging-port=0", "--remote-debugging-address=127.0.0.1",
        "--window-size=1400,820", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    drain = None
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
            for domain in ("Page", "Runtime", "Network"):
                await page.call(f"{domain}.enable")
            await page.call("Page.addScriptToEvaluateOnNewDocument", source=DEEP_QUERY)
            yield page
        finally:
            socket.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if drain is not None:
            await drain


def number(text):
    return float(re.search(r"-?[\d,]+(\.\d+)?", text)[0].replace(",", ""))


def generating_s(named):
    """Seconds in which an engine had a trajectory and was not stopped by new weights, of a run with one engine."""
    changes = [(e["t_s"], 1, 0) for e in named["quantum_dispatched"] if e["phase"] == "ROLLOUT"]
    changes += [(e["t_s"], 1, 0) for e in named.get("quantum_continued", ()) if e["phase"] == "ROLLOUT"]
    changes += [(e["t_s"], -1, 0) for e in named["quantum_finished"] if e["phase"] == "ROLLOUT"]
    for name, seconds in (("version_served", "load_s"), ("version_checked", "stopped_s")):
        changes += [(e["t_s"] - e[seconds], 0, 1) for e in named[name]] + [(e["t_s"], 0, -1) for e in named[name]]
    running = loading = 0
    before_s = total = 0.0
    for t_s, run, load in sorted(changes):
        total += t_s - before_s if running and not loading else 0.0
        running, loading, before_s = running + run, loading + load, t_s
    return total


def expected_of(run):
    """Figures by ``data-libra`` name that the page has to show, as numbers."""
    named = {}
    for line in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        named.setdefault(event["name"], []).append(event)
    finished, train = named["quantum_finished"], named["iteration_finished"]
    evaluated = {event["version"]: event for event in named["evaluation_finished"]}
    opened = {event["batch"]: event["t_s"] for event in named["batch_opened"]}
    end_s = max(event["t_s"] for events in named.values() for event in events)
    training_s = sum(min(e["train_s"], e["t_s"] - opened[e["step"]]) for e in named["step_finished"])
    known = ("worker_capacity", "engine_declared", "version_served")
    since_s = min(e["t_s"] for name in known for e in named[name] if e["worker"].startswith("rollout"))
    workers_s = end_s - since_s + end_s  # the engine from its first line on, the training worker from the start on
    published_s = [event["t_s"] for event in named["version_published"]]
    return {
        "tokens": sum(e["tokens"] for e in finished),
        "quanta_rollout": sum(e["phase"] == "ROLLOUT" for e in finished),
        "quanta_tool": sum(e["phase"] == "TOOL" for e in finished),
        "groups": sum(e["split"] == "train" for e in named["group_committed"]),
        "version": max(e["version"] for e in named["version_published"]),
        "iteration": max(e["iteration"] for e in named["gate_opened"]),
        "failures": sum(sum(e["failures"].values()) for e in named["group_committed"] if e["split"] == "train"),
        "reward": train[-1]["reward"], "lag": train[-1]["lag"], "evaluation": evaluated[max(evaluated)]["reward"],
        "step": published_s[-1] - published_s[-2],
        "share-generating": 100 * generating_s(named) / workers_s,
        "share-training": 100 * training_s / workers_s,
    }  # fmt: skip


def test_page_and_report_show_the_numbers_of_the_event_log_and_execute_nothing_of_it(recorded_run, tmp_path):
    """The page is opened on half of the log and follows the rest; the report's texts are hostile."""
    expected = expected_of(recorded_run)
    assert 0 < expected["share-generating"] < 100
    run = shutil.copytree(recorded_run, tmp_path / "run")
    lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    (run / "events.jsonl").write_bytes(b"".join(lines[: len(lines) // 2]))
    evil = shutil.copytree(recorded_run, tmp_path / "evil")
    config = (evil / "config.resolved.yaml").read_text()
    config = config.replace("name: recorded", "name: '<img src=x onerror=alert(1)><script>alert(2)</script>'")
    (evil / "config.resolved.yaml").write_text(config)
    write_report([recorded_run, evil], tmp_path / "report.html", load_prices(None))
    report = (tmp_path / "report.html").as_uri()

    async def look():
        server = page_server(run, 0)
        async with chromium(tmp_path / "profile") as page:
            try:
                await page.open(f"http://127.0.0.1:{server.port}/libra", tmp_path, "page")
                assert number(await page.shown("tokens")) < expected["tokens"]
                (run / "events.jsonl").write_bytes(b"".join(lines))
                await page.until(f"deepQuery('[data-libra=tokens]')[0].innerText == '{expected['tokens']:,}'")
                await page.until("deepQuery('[data-libra=state]')[0].innerText == 'finished'")
                assert await page.evaluate(FIRST) == ["reward", "busy"]
                assert await page.evaluate(CUT) == await page.evaluate(COVERED) == []
                shown = {name: await page.shown(name) for name in expected}
            finally:
                server.stop()
            page.requests.clear()
            await page.open(report, tmp_path, "report")
            assert [url for url in page.requests if not url.startswith("data:")] == [report]
            assert await page.evaluate("fetch('data:,x').then(() => 'answered', () => 'refused')") == "refused"
            assert await page.evaluate("globalThis.hit ?? null") is None
            assert await page.evaluate("document.images.length") == 0
            names = ("tokens", "failures", "reward", "evaluation", "share_generating", "share_training")
            return shown, {name: number(await page.shown(name)) for name in names}

    shown, reported = asyncio.run(look())
    decimals = {"reward": 3, "evaluation": 3, "lag": 2, "step": 1, "share-generating": 1, "share-training": 1}
    for name, value in expected.items():
        assert number(shown[name]) == pytest.approx(value, abs=0.51 * 10.0 ** -decimals.get(name, 0)), name
    for name, value in reported.items():
        name = name.replace("_", "-")
        assert value == pytest.approx(expected[name], abs=0.51 * 10.0 ** -decimals.get(name, 0)), name
