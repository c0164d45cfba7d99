"""The Libra page as documents and JSON that are served."""

import asyncio
import json
import logging
import math

import pytest
from tornado.httpclient import AsyncHTTPClient

from libra.observe import page_document
from libra.observe.endpoints import attach_page
from libra.observe.page_snapshots import Feed

BANDS = (0, 1, 0, 0, 0)
"""Trajectories of a sample by level."""


async def fetch(scheduler, path):
    return await AsyncHTTPClient().fetch(f"http://127.0.0.1:{scheduler.http_server.port}{path}", raise_error=False)


def drawn(page):
    sources = [page.outcomes.source, page.steps.source, page.time.samples]
    sources += [page.rewards.rewards, page.rewards.evaluations, page.lag.source]
    return {s.name: {column: list(values) for column, values in s.data.items()} for s in sources}


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
    assert {str(phase): span.location for phase, span in page.time.capacity.items()} == {"ROLLOUT": 16, "TOOL": 8}
    assert "version 3 &gt;= 3 - eta 1" in page.decisions.text


def test_new_samples_are_added_and_a_thinned_history_replaces_them(make_snapshot):
    runs = [make_snapshot()]
    page = page_document.LibraPage(Feed(lambda: runs, max_age_s=0.0))
    page.update()
    runs[0] = make_snapshot(history=[*make_snapshot()["history"], (60.0, 1, 2, 3, 4, 5000, *BANDS)])
    page.update()
    assert list(page.time.samples.data["t_s"]) == [0.5 * i for i in range(121)]
    runs[0] = make_snapshot(history=make_snapshot()["history"][::2])
    page.update()
    assert list(page.time.samples.data["t_s"]) == [float(second) for second in range(60)]


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
    assert not page.summary.visible
    assert not page.plots.visible


def test_json_and_page_are_served_once_below_the_prefix_from_the_latest_source(make_snapshot, live_scheduler):
    snapshot = make_snapshot(rewards=[[0, 0.5], [1, math.nan]])

    async def main():
        async with live_scheduler(http_prefix="cluster-7") as scheduler:
            attach_page(scheduler, lambda: [make_snapshot(run="first")], prefix="/cluster-7/")
            pages = len(scheduler.http_application.applications)
            await fetch(scheduler, "/cluster-7/libra/state.json")
            attach_page(scheduler, lambda: [snapshot], prefix="/cluster-7/")
            assert len(scheduler.http_application.applications) == pages
            paths = ("libra/state.json", "libra", "status")
            assert (await fetch(scheduler, "/libra/state.json")).code == 404
            return [await fetch(scheduler, f"/cluster-7/{path}") for path in paths]

    answer, page, status = asyncio.run(main())
    assert answer.code == page.code == status.code == 200
    assert answer.headers["Content-Type"].startswith("application/json")
    (got,) = json.loads(answer.body, parse_constant=lambda name: pytest.fail(f"not JSON: {name}"))
    assert got["rewards"] == [[0, 0.5], [1, None]]
    assert got["queue"] == {"ROLLOUT": {"0": 21, "1": 9, "3": 2}, "TOOL": {"0": 5}}
    assert got["history"] == [list(row) for row in snapshot["history"]]
    assert all(got[k] == snapshot[k] for k in ("run", "tokens", "groups", "quanta"))
    assert b'href="libra"' in page.body
    assert status.body.count(b'href="libra"') == 1


def test_without_a_dashboard_the_json_stays_and_the_reason_is_logged(make_snapshot, live_scheduler, caplog):
    async def main():
        async with live_scheduler(dashboard=False) as scheduler:
            with caplog.at_level(logging.WARNING, "libra.observe.endpoints"):
                attach_page(scheduler, lambda: [make_snapshot()])
            return [(await fetch(scheduler, path)).code for path in ("/libra/state.json", "/libra")]

    assert asyncio.run(main()) == [200, 404]
    assert "no Libra page" in caplog.text
