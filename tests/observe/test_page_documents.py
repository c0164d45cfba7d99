"""The Libra page as documents and JSON that are served, and as a real browser draws it."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
import weakref
from types import SimpleNamespace

import pytest
from page_rows import BANDS, SHOWN_ROWS, UNREADY, role
from tornado.httpclient import AsyncHTTPClient

from libra.observe import page as page_module
from libra.observe import page_document, page_panels
from libra.observe.page import attach_page
from libra.observe.page_snapshot import Feed, numbers


async def fetch(scheduler, path):
    return await AsyncHTTPClient().fetch(f"http://127.0.0.1:{scheduler.http_server.port}{path}", raise_error=False)


def drawn(page):
    """Columns of every source of a page, as lists."""
    sources = (
        page.outcomes.source,
        page.steps.source,
        page.time.samples,
        page.rewards.rewards,
        page.rewards.evaluations,
    )
    sources += (page.lag.source,)
    return {s.name: {column: list(values) for column, values in s.data.items()} for s in sources}


# -- feed and documents ----------------------------------------------------------------------------------------------


def test_many_readers_cost_one_snapshot_per_interval(make_snapshot):
    now, calls = [0.0], []
    feed = Feed(lambda: calls.append(1) or [make_snapshot()], max_age_s=0.4, clock_s=lambda: now[0])
    for _ in range(50):
        feed.read()
    assert len(calls) == 1
    now[0] = 0.4
    feed.read()
    assert len(calls) == 2
    feed.follow(list)
    assert feed.read() == []


def test_document_holds_the_snapshots_values(make_snapshot):
    snapshot = make_snapshot()
    page = page_document.LibraPage(Feed(lambda: [snapshot]))
    page.update()
    data = drawn(page)
    assert data["libra_outcomes"] == {"first": [500, 510], "half": [800, 300], "tokens": [900, 250]}
    assert "The latest 2, skill 0.21." in page.outcomes.head.text
    steps = {name: values for name, values in data["libra_steps"].items() if any(values)}
    assert steps == {"step": [0, 1], "trajectories": [9.0, 6.0], "training": [1.5, 1.5], "moving": [0.0, 0.5]}
    shown = [item.label.value for item in page.steps.plot.legend[0].items if item.visible]
    assert shown == ["trajectories", "training", "moving"]
    assert data["libra_evaluations"] == {"version": [0, 2], "reward": [0.25, 0.5]}
    assert data["libra_rewards"] == {"iteration": [0, 1, 2], "reward": [0.28125, 0.40625, 0.5625]}
    assert data["libra_lag"] == {"iteration": [0, 1, 2], "lag": [0.0, 0.5, 0.75]}
    for index, name in enumerate(("t_s", "queued_rollout", "queued_tool", "used_rollout", "used_tool")):
        assert data["libra_samples"][name] == [row[index] for row in snapshot["history"]]
    assert data["libra_samples"]["band_1"] == [row[7] for row in snapshot["history"]]
    assert data["libra_samples"]["tokens_per_s"][10:] == pytest.approx([74.0] * 110)
    shown = [item.label.value for item in page.time.queue.plot.legend[0].items if item.visible]
    assert shown == ["level 0–1", "level 2–10", "for tools"]
    assert "Now 14 of 16 ROLLOUT, 3 of 8 TOOL." in page.time.slots.head.text
    assert {str(phase): span.location for phase, span in page.time.capacity.items()} == {"ROLLOUT": 16, "TOOL": 8}
    assert "version 3 &gt;= 3 - eta 1" in page.decisions.text


def test_lag_that_cannot_be_is_a_line_and_no_plot(make_snapshot):
    runs = [make_snapshot(eta=0, lag=[[0, 0.0], [1, 0.0]])]
    page = page_document.LibraPage(Feed(lambda: runs, max_age_s=0.0))
    page.update()
    assert not page.lag.plot.visible
    assert "every token was trained on with the weights that made it" in page.lag.head.text
    runs[0] = make_snapshot(eta=1, lag=[[0, 0.0], [1, 0.0]])
    page.update()
    assert page.lag.plot.visible


def test_a_thinned_history_replaces_the_samples(make_snapshot):
    runs = [make_snapshot()]
    page = page_document.LibraPage(Feed(lambda: runs, max_age_s=0.0))
    page.update()
    runs[0] = make_snapshot(history=make_snapshot()["history"][::2])
    page.update()
    assert list(page.time.samples.data["t_s"]) == [float(second) for second in range(60)]


def test_update_streams_new_samples_only_and_keeps_a_bound(make_snapshot, monkeypatch):
    monkeypatch.setattr(page_panels, "MAX_SAMPLES", 100)
    history = [(0.5 * i, i, 0, 0, 0, 10 * i, *BANDS) for i in range(60)]
    runs = [make_snapshot(history=list(history))]
    page = page_document.LibraPage(Feed(lambda: runs, max_age_s=0.0))
    page.update()
    streamed = []
    original = page.time.samples.stream
    monkeypatch.setattr(
        type(page.time.samples), "stream", lambda _self, new, n: (streamed.append(new), original(new, n))
    )
    page.update()
    assert streamed == []
    history += [(0.5 * i, i, 0, 0, 0, 10 * i, *BANDS) for i in range(60, 130)]
    runs[0] = make_snapshot(history=history[10:])  # the oldest samples have left the plugin's own bound
    page.update()
    assert [list(new["queued_rollout"]) for new in streamed] == [list(range(60, 130))]
    assert list(page.time.samples.data["queued_rollout"]) == list(range(30, 130))
    assert streamed[0]["tokens_per_s"] == pytest.approx([20.0] * 70)


def test_a_page_at_rest_sends_nothing(make_snapshot):
    from bokeh.document import Document

    runs = [make_snapshot(), make_snapshot(run="other")]
    page = page_document.LibraPage(Feed(lambda: runs, max_age_s=0.0))
    page.update()
    doc = Document()
    doc.add_root(page.root)
    sent = []
    doc.on_change(sent.append)
    page.update()
    assert sent == []
    runs[1] = make_snapshot(run="other", groups=24)
    page.update()
    assert {event.model.name for event in sent} == {"libra_summary", "libra_overview"}


def test_choosing_a_run_or_starting_it_anew_replaces_the_samples(make_snapshot):
    runs = [make_snapshot(), make_snapshot(run="other", history=[(0.0, 5, 5, 5, 5, 0, *BANDS)], groups=99)]
    page = page_document.LibraPage(Feed(lambda: runs, max_age_s=0.0))
    page.update()
    assert page.select.value == "other"
    assert page.select.visible
    assert list(page.time.samples.data["t_s"]) == [0.0]
    page.select.value = "demo"
    assert len(page.time.samples.data["t_s"]) == 120
    assert "1,517" in page.summary.text
    runs[0] = make_snapshot(epoch=2, history=[(0.0, 1, 1, 1, 1, 0, *BANDS), (0.5, 1, 1, 1, 1, 3, *BANDS)])
    page.update()
    assert list(page.time.samples.data["t_s"]) == [0.0, 0.5]
    del runs[0]
    page.update()
    assert page.select.value == "other"
    runs.clear()
    page.update()
    assert "No run" in page.overview.text
    assert not page.summary.visible
    assert not page.plots.visible


# -- serving ---------------------------------------------------------------------------------------------------------


def test_json_is_the_snapshot_and_strict(make_snapshot, live_scheduler):
    snapshot = make_snapshot(rewards=[[0, 0.5], [1, math.nan]])

    async def main():
        async with live_scheduler() as scheduler:
            attach_page(scheduler, lambda: [snapshot])
            answer = await fetch(scheduler, "/libra/state.json")
            page = await fetch(scheduler, "/libra")
            status = await fetch(scheduler, "/status")
            return answer, page, status

    answer, page, status = asyncio.run(main())
    assert answer.code == page.code == status.code == 200
    assert answer.headers["Content-Type"].startswith("application/json")
    (got,) = json.loads(answer.body, parse_constant=lambda name: pytest.fail(f"not JSON: {name}"))
    assert got["rewards"] == [[0, 0.5], [1, None]]
    assert got["queue"] == {"ROLLOUT": {"0": 21, "1": 9, "3": 2}, "TOOL": {"0": 5}}
    assert got["history"] == [list(row) for row in snapshot["history"]]
    assert {k: got[k] for k in ("run", "tokens", "groups", "quanta")} == {
        k: snapshot[k] for k in ("run", "tokens", "groups", "quanta")
    }
    assert b'href="libra"' in page.body
    assert b'href="libra"' in status.body


def test_attaching_twice_leaves_one_page_with_the_latest_source(make_snapshot, live_scheduler):
    async def main():
        async with live_scheduler() as scheduler:
            attach_page(scheduler, lambda: [make_snapshot(run="first")])
            pages = len(scheduler.http_application.applications)
            await fetch(scheduler, "/libra/state.json")
            attach_page(scheduler, lambda: [make_snapshot(run="second")])
            assert len(scheduler.http_application.applications) == pages
            status = await fetch(scheduler, "/status")
            assert status.body.count(b'href="libra"') == 1
            return json.loads((await fetch(scheduler, "/libra/state.json")).body)

    assert [snapshot["run"] for snapshot in asyncio.run(main())] == ["second"]


@pytest.mark.parametrize("given", ["", "cluster-7", "/cluster-7/"])
def test_dashboard_prefix_is_respected(make_snapshot, live_scheduler, given):
    async def main():
        async with live_scheduler(http_prefix="cluster-7") as scheduler:
            attach_page(scheduler, lambda: [make_snapshot()], prefix=given)
            paths = ("/cluster-7/libra", "/cluster-7/libra/state.json", "/cluster-7/status", "/libra/state.json")
            return [(await fetch(scheduler, path)).code for path in paths]

    assert asyncio.run(main()) == [200, 200, 200, 404]


def test_without_a_dashboard_the_json_stays_and_the_reason_is_logged(make_snapshot, live_scheduler, caplog):
    async def main():
        async with live_scheduler(dashboard=False) as scheduler:
            with caplog.at_level(logging.WARNING, "libra.observe.page"):
                attach_page(scheduler, lambda: [make_snapshot()])
            return [(await fetch(scheduler, path)).code for path in ("/libra/state.json", "/libra")]

    assert asyncio.run(main()) == [200, 404]
    assert "no Libra page" in caplog.text


def test_without_an_http_server_nothing_happens_but_a_logged_reason(caplog):
    with caplog.at_level(logging.WARNING, "libra.observe.page"):
        attach_page(SimpleNamespace(), list)
    assert "no HTTP server" in caplog.text


def test_without_bokeh_the_reason_is_logged(make_snapshot, live_scheduler, caplog, monkeypatch):
    import sys

    async def main():
        async with live_scheduler() as scheduler:
            monkeypatch.setitem(sys.modules, "libra.observe.page_document", None)  # what a failing import leaves
            with caplog.at_level(logging.WARNING, page_module.__name__):
                attach_page(scheduler, lambda: [make_snapshot()])
            return [(await fetch(scheduler, path)).code for path in ("/libra/state.json", "/libra", "/status")]

    assert asyncio.run(main()) == [200, 404, 200]
    assert "pip install bokeh" in caplog.text


def test_documents_die_with_their_session(make_snapshot, live_scheduler, monkeypatch):
    pages = weakref.WeakSet()

    class Watched(page_document.LibraPage):
        def __init__(self, feed):
            super().__init__(feed)
            pages.add(self)

    monkeypatch.setattr(page_document, "LibraPage", Watched)

    async def main():
        async with live_scheduler() as scheduler:
            attach_page(scheduler, lambda: [make_snapshot()])
            for _ in range(3):
                assert (await fetch(scheduler, "/libra")).code == 200
            assert len(pages) == 3
            app = next(a for a in scheduler.http_application.applications if "/libra" in getattr(a, "app_paths", ()))
            context = app.get_sessions("/libra")
            assert len(context) == 3
            await app._applications["/libra"]._cleanup_sessions(-1)  # as Bokeh does every 17 s
            assert app.get_sessions("/libra") == []
            context.clear()
            async with asyncio.timeout(30):  # the last tick of a periodic callback holds its page up to half a second
                while pages:
                    await fetch(scheduler, "/health")
                    gc.collect()

    asyncio.run(main())


# -- in a browser ----------------------------------------------------------------------------------------------------


async def follows_another_run(page, runs, make_snapshot):
    """A second run is chosen, with a worker that changes its role and one that is not ready; a picture of it."""
    runs.append(make_snapshot(run="second", groups=5))
    await page.until("deepQuery('tr.shown').length == 1 && modelNamed('libra_run').visible")
    assert await page.shown("groups") == "1,024"  # a new run does not take the place of the one looked at
    await page.evaluate("modelNamed('libra_run').value = 'second'; null")
    await page.until("deepQuery('[data-libra=groups]')[0].innerText == '5'")
    runs[1] = make_snapshot(run="second", groups=6, roles=[role(stage="draining", for_s=75.4)], not_ready=[UNREADY])
    await page.until("deepQuery('[data-libra=role-rollout-0]').length == 1")
    assert await page.shown("role-rollout-0") == "\t".join(
        ["rollout-0", "train", "draining", "1 min 15 s", "rollout TP 2 → train", "4", "1.25 s", "asked for"]
    )
    assert (await page.shown("not-ready-tool-1")).split("\t") == [
        "tool-1",
        "failed",
        "3 s",
        "OSError: no <disk>",
        "in 1 min 30 s",
    ]
    red, marked = (f"getComputedStyle(deepQuery('[data-libra={name}] td')[0])" for name in SHOWN_ROWS)
    assert await page.evaluate(f"{red}.color") == "rgb(179, 38, 30)"
    assert await page.evaluate(f"{marked}.backgroundColor") == "rgb(234, 241, 248)"
    png = await page.screenshot()

    runs[1] = make_snapshot(run="second", groups=7, roles=[role(stage="resupplied", for_s=0.2)])
    await page.until("deepQuery('[data-libra=role-rollout-0]')[0].innerText.includes('resupplied')")
    assert (await page.shown("role-rollout-0")).split("\t")[4] == ""
    assert await page.evaluate("deepQuery('[data-libra=not-ready-tool-1]').length") == 0
    runs[1] = make_snapshot(run="second", groups=8)
    await page.until("deepQuery('[data-libra=groups]')[0].innerText == '8'")
    await page.until("deepQuery('[data-libra^=role]').length == 0")
    return png


def test_browser_draws_the_snapshots_numbers_and_follows_them(make_snapshot, live_scheduler, chromium, tmp_path):
    runs = [make_snapshot()]

    async def main():
        async with live_scheduler() as scheduler:
            attach_page(scheduler, lambda: list(runs))
            async with chromium(f"http://127.0.0.1:{scheduler.http_server.port}/libra") as page:
                for name, (value, _) in numbers(runs[0]).items():
                    assert await page.shown(name) == value, name
                assert await page.shown("run") == "demo"
                assert await page.until("deepQuery('canvas').length >= 7")
                assert (await page.columns("libra_outcomes"))["half"] == [800, 300]
                assert (await page.columns("libra_rewards"))["reward"] == [0.28125, 0.40625, 0.5625]
                assert (await page.columns("libra_samples"))["t_s"] == [row[0] for row in runs[0]["history"]]
                assert await page.until("[...document.querySelectorAll('.navbar a')].some(a => a.innerText == 'Libra')")

                later = [*runs[0]["history"], (60.0, 1, 2, 3, 4, 5000, *BANDS)]
                runs[0] = make_snapshot(groups=1024, history=later, rewards=[*runs[0]["rewards"], [3, 0.75]])
                await page.until("deepQuery('[data-libra=groups]')[0].innerText == '1,024'")
                assert await page.shown("reward") == "0.750"
                await page.until(
                    "Array.from(modelNamed('libra_samples').data.t_s).at(-1) == 60"
                )  # streamed after the tiles
                samples = await page.columns("libra_samples")
                assert [samples[c][-1] for c in ("t_s", "queued_rollout", "used_tool")] == [60.0, 1, 4]

                png = await follows_another_run(page, runs, make_snapshot)
                assert page.exceptions == []
                return png

    (tmp_path / "libra.png").write_bytes(asyncio.run(main()))  # to look at; pytest keeps the last three
