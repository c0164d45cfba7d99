"""The figures and tables of the Libra page against the snapshots."""

import math
import re
from html import unescape
from itertools import pairwise

import pytest

from libra.observe import page_document
from libra.observe.page_document import overview_html, summary_html, workers_html
from libra.observe.page_snapshots import Feed, numbers, tokens_per_s
from libra.observe.panels import log_ticks

UNREADY = {"worker": "tool-1", "address": "tcp://h:1", "stage": "failed", "for_s": 3.9, "detail": "OSError: no <disk>",
           "again_in_s": 90.2}  # fmt: skip


def role(**changes):
    """A row of a worker on its way from an engine of two GPUs to training."""
    return {
        "worker": "rollout-0", "role": "train", "tp": 2, "stage": "taking_up", "generation": 4, "from_role": "rollout",
        "from_tp": 2, "for_s": 3.2, "seconds": 1.25, "reason": "asked for",
    } | changes  # fmt: skip


def test_tokens_per_s_is_taken_over_the_window_only():
    history = [(0.0, 0, 0, 0, 0, 0), (10.0, 0, 0, 0, 0, 1000), (15.0, 0, 0, 0, 0, 1100), (20.0, 0, 0, 0, 0, 1500)]
    assert tokens_per_s(history, window_s=10.0) == pytest.approx(50.0)
    assert tokens_per_s(history, window_s=5.0) == pytest.approx(80.0)
    assert tokens_per_s(history[:1]) == 0.0
    assert tokens_per_s([(1.0, 0, 0, 0, 0, 5), (1.0, 0, 0, 0, 0, 9)]) == 0.0


def test_numbers_are_the_snapshots(make_snapshot):
    shown = {name: value for name, (value, _) in numbers(make_snapshot()).items()}
    assert shown == {
        "busy": "62 %", "reward": "0.562", "evaluation": "0.500", "iteration": "3", "left": "1 min 35 s", "step": "8.0 s",
        "tokens_per_s": "74", "waiting": "37", "lag": "0.75", "version": "v3", "failures": "4", "tokens": "4,403", "groups": "23",
        "quanta_rollout": "1,517", "quanta_tool": "1,203", "policy": "cmlfq",
    }  # fmt: skip
    beside = {name: re.findall(r"[\d.]+", text) for name, (_, text) in numbers(make_snapshot()).items()}
    assert beside["busy"] == ["75", "60"] and beside["step"] == ["1", "6.0", "1.5"]
    assert beside["waiting"] == ["21", "0", "9", "1", "2", "3", "5", "0"]
    assert beside["evaluation"] == ["2", "64", "0.250", "0"]
    assert beside["failures"] == ["3", "1"] and beside["version"] == ["1", "2"]


@pytest.mark.parametrize("span", [2.3, 8, 10, 40, 99, 1e3, 1e5])
def test_ticks_of_a_logarithmic_axis_have_room_for_their_labels(span):
    for low in (1e-5, 0.7, 1.3, 2.1, 4.0, 300.0):
        ticks = log_ticks(low, low * span)
        assert 1 <= len(ticks) <= 8
        assert all(300 * math.log10(b / a) / math.log10(span) > 35 for a, b in pairwise(ticks))


@pytest.mark.parametrize(("state", "said"), [("finished", "done"), ("stopped", "stopped")])
def test_of_a_run_that_has_ended_nothing_is_said_of_now(make_snapshot, state, said):
    ended = make_snapshot(state=state)
    assert numbers(ended)["left"] == (said, "after 1 min 00 s")
    assert numbers(ended)["busy"] == ("62 %", "of the whole run")
    assert numbers(ended)["tokens_per_s"] == ("73", "over the run")
    assert "now-generating" not in summary_html(ended)
    assert "now-generating" in summary_html(make_snapshot())
    assert "tail" not in re.sub('title="[^"]*"', "", workers_html(ended))


def test_where_time_went_is_told_by_cause_and_adds_up(make_snapshot):
    shares = re.findall(r'data-libra="share-(\w+)">([\d.]+) %', summary_html(make_snapshot()))
    assert dict(shares) == {"generating": "50.0", "training": "12.5", "tail": "37.5"}


def test_a_run_that_has_not_begun_shows_dashes_instead_of_zeros(make_snapshot):
    fresh = make_snapshot(
        iteration=-1, rewards=[], lag=[], history=[], failures={}, versions={"published": 0, "served": {}}, left_s=None,
        evaluations=[], steps=[], decisions=[], tokens=0, queue={"ROLLOUT": {}, "TOOL": {}},
        time={"until_s": 0.0, "busy_frac": None, "now_busy_frac": None, "shares": {}, "now_shares": {}, "workers": []},
        policy=make_snapshot()["policy"] | {"outcomes": []},
    )  # fmt: skip
    shown = numbers(fresh)
    for name in ("busy", "iteration", "reward", "evaluation", "left", "step", "lag"):
        assert shown[name][0] == "–", name
    assert (shown["version"][0], shown["failures"][0]) == ("v0", "0")
    page = page_document.LibraPage(Feed(lambda: [fresh]))
    page.update()
    panels = (page.rewards, page.steps, *page.time.panels, page.lag, page.outcomes)
    assert [panel.plot.visible for panel in panels] == [False] * 7


def test_an_iteration_without_a_graded_trajectory_is_a_gap(make_snapshot):
    for missing in (None, math.nan):
        runs = [make_snapshot(rewards=[[0, 0.5], [1, missing]], lag=[[0, 0.0], [1, missing]])]
        assert numbers(runs[0])["reward"][0] == "–"
        assert numbers(runs[0])["lag"][0] == "–"
        page = page_document.LibraPage(Feed(lambda runs=runs: runs))
        page.update()
        assert page.rewards.rewards.data["reward"][0] == 0.5
        assert math.isnan(page.rewards.rewards.data["reward"][1])
        assert page.lag.plot.y_range.end == pytest.approx(1.15)


def test_names_from_outside_cannot_inject_markup(make_snapshot):
    evil = make_snapshot(run="<script>x</script>", failures={"<b>": 1})
    for html in (summary_html(evil), overview_html([evil, make_snapshot()], "demo")):
        assert "<script>" not in html
        assert "<b>:" not in html
        assert "&lt;script&gt;" in html


def cells(html, name):
    (row,) = re.findall(f'<tr data-libra="{name}"[^>]*>(.*?)</tr>', html)
    return [unescape(cell) for cell in re.findall("<td>(.*?)</td>", row)]


@pytest.mark.parametrize(("changes", "stage", "under_way"), [
    ({}, "taking_up", "rollout TP 2 → train"),
    ({"role": "rollout", "from_role": "lent"}, "taking_up", "lent → rollout TP 2"),
    ({"role": "rollout"}, "taking_up", "back to rollout TP 2"),
    ({"stage": "resupplied"}, "resupplied", ""),
])  # fmt: skip
def test_a_row_of_roles_says_from_what_to_what_while_a_change_goes_on(changes, stage, under_way):
    shown = cells(workers_html({"roles": [role(**changes)]}), "role-rollout-0")
    assert (shown[2], shown[4]) == (stage, under_way)


def test_tables_of_roles_and_of_buckets_are_there_only_if_they_say_something(make_snapshot):
    html = workers_html(make_snapshot())
    assert "role-" not in html
    assert "not-ready-" not in html
    assert cells(html, "bucket-tp4") == ["tp4", "1", "6 of 8", "3", "9", "2,210"]
    one = make_snapshot(buckets=make_snapshot()["buckets"][1:])
    assert "bucket-" not in workers_html(one)
    assert workers_html({}) == ""


def test_a_worker_has_one_line_with_what_it_does(make_snapshot):
    (row,) = re.findall('<tr data-libra="worker-rollout-0">(.*?)</tr>', workers_html(make_snapshot()))
    text = [re.sub("<[^>]*>", "", cell) for cell in re.findall("<td>(.*?)</td>", row)]
    assert text == ["rollout-0", "engine", "tail", "50 %", "", "25 %", "v3"]
    assert row.count("width:50.00%") == 2


def test_what_workers_are_called_and_say_cannot_inject_markup():
    evil = "<script>'\"x</script>"
    html = workers_html({
        "roles": [role(worker=evil, reason=evil, role=evil, stage=evil)],
        "not_ready": [UNREADY | {"worker": evil, "detail": evil}],
    })  # fmt: skip
    assert "<script>" not in html
    assert html.count("&lt;script&gt;&#39;&#34;x") == 9  # each cell, both attributes, and where the change leads


def test_the_tables_leave_with_the_run(make_snapshot):
    runs = [make_snapshot(roles=[role()], not_ready=[UNREADY])]
    page = page_document.LibraPage(Feed(lambda: runs, max_age_s=0.0))
    page.update()
    assert page.tables.visible
    assert "role-rollout-0" in page.workers.text
    runs.clear()
    page.update()
    assert not page.tables.visible
