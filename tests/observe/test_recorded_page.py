"""`libra page` and the report of one short run, as pictures and as numbers, against what its event log says.

What is expected is worked out here from the lines of the log, by none of the functions that make the pages.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import re
import signal
import struct
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from libra.cli.page import page_server
from libra.hardware.prices import load_prices
from libra.observe.recorded_run import RecordedRun
from libra.observe.report import write_report

WIDTHS, SCHEMES = (1280, 2560), ("light", "dark")


def lines_of(run):
    """The event log's lines as dicts, by the names of their events."""
    parts = [gzip.decompress(path.read_bytes()) for path in sorted((run / "events").glob("*.gz"))]
    named = {}
    for line in b"".join([*parts, (run / "events.jsonl").read_bytes()]).splitlines():
        event = json.loads(line)
        named.setdefault(event["name"], []).append(event)
    return named


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
    """Figures by ``data-libra`` name that page and report have to show, as numbers."""
    named = lines_of(run)
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


def number(text):
    """The number in a text as shown."""
    return float(re.search(r"-?[\d,]+(\.\d+)?", text)[0].replace(",", ""))


async def pictures(page, url, ready, folder, name):
    """Pictures of a page at every width and scheme, each checked: it fills the window, in the scheme's colours."""
    await page.call("Page.navigate", url=url)
    for width in WIDTHS:
        size = {"width": width, "height": 1100, "deviceScaleFactor": 1, "mobile": False}
        await page.call("Emulation.setDeviceMetricsOverride", **size)
        for scheme in SCHEMES:
            await page.scheme(scheme)
            await page.until(f"document.documentElement.dataset.painted && ({ready})")
            await page.until("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
            await page.evaluate(
                "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
            )
            back = await page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (number(back) < 60) == (scheme == "dark"), (name, width, scheme, back)
            png = base64.b64decode((await page.call("Page.captureScreenshot", format="png"))["data"])
            (folder / f"{name}-{width}-{scheme}.png").write_bytes(png)  # to look at; pytest keeps the last three
            assert struct.unpack(">I", png[16:20])[0] == width
            assert len(png) > 30_000, (name, width, scheme, "an empty page")
    assert page.exceptions == []


def test_pictures_and_numbers_of_page_and_report_are_those_of_the_event_log(recorded_run, chromium, tmp_path):
    expected = expected_of(recorded_run)
    assert 0 < expected["share-generating"] < 100
    assert 0 < expected["share-training"] < 100
    report = tmp_path / "report.html"
    write_report([recorded_run], report, load_prices(None))

    async def main():
        server = page_server(recorded_run, 0)
        url = f"http://127.0.0.1:{server.port}/libra"
        drawn = "deepQuery('canvas').filter(c => c.getBoundingClientRect().width > 100).length >= 5"
        async with chromium("about:blank") as page:
            try:
                await pictures(page, url, f"deepQuery('[data-libra=busy]').length && {drawn}", tmp_path, "page")
                shown = {name: await page.shown(name) for name in expected}
                state, busy = await page.shown("state"), number(await page.shown("busy"))
                columns = await page.columns("libra_rewards"), await page.columns("libra_evaluations")
                await page.scheme("light")
                await page.call("Page.navigate", url=f"{url}?theme=dark")
                await page.until("document.documentElement.dataset.painted")
                asked = await page.evaluate("getComputedStyle(document.body).backgroundColor")
                await page.evaluate("document.getElementById('theme').click()")
                clicked = await page.evaluate("getComputedStyle(document.body).backgroundColor")
                bar = "deepQuery('.hero .bar i').reduce((sum, part) => sum + parseFloat(part.style.width), 0)"
                assert await page.evaluate(bar) == pytest.approx(100, abs=0.1)
                await page.evaluate("localStorage.clear()")
                await pictures(page, report.as_uri(), drawn, tmp_path, "report")
                names = ("tokens", "reward", "evaluation", "share_generating", "share_training", "busy_share")
                reported = {name: number(await page.shown(name)) for name in names}
            finally:
                server.stop()
        return shown, state, busy, columns, asked, clicked, reported

    shown, state, busy, (rewards, held_out), asked, clicked, reported = asyncio.run(main())
    assert state == "finished"
    assert number(asked) < 60 < number(clicked)
    decimals = {"reward": 3, "evaluation": 3, "lag": 2, "step": 1, "share-generating": 1, "share-training": 1}
    for name, value in expected.items():
        assert number(shown[name]) == pytest.approx(value, abs=0.51 * 10.0 ** -decimals.get(name, 0)), name
    named = lines_of(recorded_run)
    assert rewards["reward"] == [e["reward"] for e in named["iteration_finished"]]
    assert held_out["version"] == [e["version"] for e in named["evaluation_finished"]]
    assert reported["tokens"] == expected["tokens"]
    for name in ("generating", "training"):
        assert reported[f"share_{name}"] == pytest.approx(expected[f"share-{name}"], abs=0.051)
    assert reported["reward"] == number(shown["reward"])
    assert reported["evaluation"] == number(shown["evaluation"])
    assert reported["busy_share"] == pytest.approx(busy, abs=0.51)


def test_a_log_that_grows_is_followed_and_read_once(recorded_run, tmp_path):
    whole = (recorded_run / "events.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "config.resolved.yaml").write_bytes((recorded_run / "config.resolved.yaml").read_bytes())
    log, half = tmp_path / "events.jsonl", len(whole) // 2
    run = RecordedRun(tmp_path)
    (before,) = run.snapshots()
    assert (before["state"], before["run"], before["tokens"]) == ("new", "recorded", 0)
    assert "no event log" in before["note"]
    log.write_bytes(b"".join(whole[:half]) + whole[half][:10])  # the writer is in the middle of a line
    (middle,) = run.snapshots()
    assert middle["note"] == ""
    assert run.facts.num_events == half
    assert run.snapshots()[0] is middle
    log.write_bytes(b"".join(whole))
    (after,) = run.snapshots()
    assert run.facts.num_events == len(whole)
    assert 0 < middle["tokens"] < after["tokens"]
    assert after["tokens"] == RecordedRun(recorded_run).snapshots()[0]["tokens"]


def start(*args):
    command = [sys.executable, "-m", "libra", "page", *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def status(url, **headers):
    request = urllib.request.Request(url, headers=headers)
    try:
        return urllib.request.urlopen(request, timeout=60).status
    except urllib.error.HTTPError as error:
        return error.code


def test_the_command_serves_on_this_machine_and_ends_with_one_line(recorded_run, tmp_path):
    process = start(recorded_run, "--port", "0")
    try:
        (url,) = re.findall(r"http://127\.0\.0\.1:\d+/libra", process.stdout.readline())
        assert status(url) == status(url.removesuffix("libra")) == 200
        assert json.loads(urllib.request.urlopen(f"{url}/state.json", timeout=60).read())[0]["state"] == "finished"
        assert status(url, Host="evil.example") == 403
        assert status(f"{url}/state.json", Origin="http://evil.example") == 403
        port = re.search(r":(\d+)/", url)[1]
        other = start(recorded_run, "--port", port)
        out, err = other.communicate(timeout=60)
        assert (other.returncode, out) == (2, "")
        assert re.fullmatch(rf"libra: --port {port}: .*Address already in use.* libra page .*--port 0\n", err)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")
        assert out.strip() == f"ended; to see it again, type: libra page {recorded_run}"
    finally:
        process.kill()
        process.wait()
    missing = start(tmp_path / "none")
    out, err = missing.communicate(timeout=60)
    assert (missing.returncode, out, err.count("\n")) == (2, "", 1)
    assert "does not exist" in err
