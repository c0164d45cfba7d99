"""`libra report`: the page of a real run in a real browser against its event log, runs side by side, missing data, hostile text."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
from collections import Counter
from html import unescape

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from libra import events
from libra.errors import ConfigError
from libra.hardware.prices import load_prices
from libra.observe.log_facts import read_log
from libra.observe.report import write_report
from libra.observe.report.page import SECTIONS
from libra.observe.report.where_time import coarse
from libra.observe.worker_time import worker_times
from libra.store.event_log import EventLog, read_events
from libra.store.trajectories import TrajectoryStore
from libra.types import EndReason, FailureClass, Prompt, Trajectory, TrajectoryId


@pytest.fixture
def prices():
    return load_prices()


def numbers_in(page):
    """The marked numbers of a page: (name, run) -> text."""
    found = re.findall(r'<b data-libra="([^"]+)" data-run="([^"]+)">([^<]*)</b>', page)
    return {(name, run): unescape(text) for name, run, text in found}


def percent(share):
    return f"{100 * share:.1f} %"


def test_browser_shows_the_numbers_of_the_event_log_and_asks_for_nothing(recorded_run, prices, chromium, tmp_path):
    output = tmp_path / "report.html"
    write_report([recorded_run], output, prices)
    log = list(read_log(recorded_run / "events.jsonl"))
    times = worker_times(log, ("train-0",)).times()
    assert sum(times.shares.values()) == pytest.approx(1.0)

    async def look():
        async with chromium(output.as_uri()) as page:
            await page.until("document.documentElement.dataset.painted")
            marked = "[...document.querySelectorAll('[data-libra]')].map(e => [e.dataset.libra, e.innerText])"
            shown = dict(await page.evaluate(marked))
            drawn = (
                "Bokeh.documents.flatMap(d => [...d._all_models.values()]).filter(m => m.name?.startsWith('share_'))"
            )
            bars = await page.evaluate(f"{drawn}.map(m => [m.name, Array.from(m.data.row), Array.from(m.data.right)])")
            canvases = await page.evaluate("deepQuery('canvas').length")
            ink = "getComputedStyle(document.body).backgroundColor"
            colors, pictures = [], []
            for scheme in ("light", "dark"):
                await page.scheme(scheme)
                colors.append(await page.evaluate(ink))
                pictures.append(await page.screenshot())
            models = "Bokeh.documents.flatMap(d => [...d._all_models.values()])"
            label = f"{models}.find(m => m.type == 'LinearAxis').major_label_text_color"
            await page.until(f"{label} == getComputedStyle(document.documentElement).getPropertyValue('--soft').trim()")
            assert (page.exceptions, page.complaints) == ([], [])
            refused = "fetch('data:,x').then(() => 'answered', () => 'refused')"
            assert await page.evaluate(refused) == "refused", "the page may request nothing"
            return shown, bars, canvases, colors, pictures, page.requests

    shown, bars, canvases, colors, pictures, requests = asyncio.run(look())
    for name, picture in zip(("light", "dark"), pictures, strict=True):
        (tmp_path / f"{name}.png").write_bytes(picture)  # to look at; pytest keeps the last three
    assert [url for url in requests if not url.startswith("data:")] == [output.as_uri()]  # a data: URL is in the file
    assert colors[0] != colors[1]
    assert canvases >= 8
    assert shown["busy"] == shown["busy_share"] == percent(times.busy_frac)
    assert {name: shown[f"share_{name}"] for name in times.shares} == {n: percent(s) for n, s in times.shares.items()}
    assert shown["tokens"] == f"{sum(e.tokens for e in log if isinstance(e, events.QuantumFinished)):,}"
    ended = [e for e in log if isinstance(e, events.IterationFinished)]
    assert shown["iterations"] == f"{len(ended)}"
    assert float(shown["reward"]) == pytest.approx(ended[-1].reward, abs=5e-4)
    last = json.loads(sorted((recorded_run / "evaluations").iterdir())[-1].read_text())
    assert float(shown["evaluation"]) == pytest.approx(last["reward"], abs=5e-4)
    hours = sum(times.gpu_s.values()) / 3600
    assert float(shown["cost"]) == pytest.approx(hours * prices.core_hour.price, abs=5e-5)
    by_worker = {worker.worker: worker for worker in times.workers}
    assert set(by_worker) == {"rollout-0", "tool-0", "train-0"}
    generating = next(dict(zip(rows, right, strict=True)) for name, rows, right in bars if name == "share_generating")
    assert generating["rollout-0"] == pytest.approx(by_worker["rollout-0"].shares["generating"])


def test_two_runs_stand_side_by_side_with_the_settings_that_differ(recorded_run, prices, tmp_path):
    other = shutil.copytree(recorded_run, tmp_path / "other")
    config = other / "config.resolved.yaml"
    config.write_text(config.read_text().replace("iterations: 2", "iterations: 20"))
    runs = write_report([recorded_run, other], tmp_path / "both.html", prices)
    page = (tmp_path / "both.html").read_text()
    found = numbers_in(page)
    assert found["busy", "recorded"] == found["busy", "other"] == percent(runs[0].time.busy_frac)
    assert found["iterations", "other"] == "2"
    differing = page[page.index('<section id="settings">') :]
    assert re.search(r"<td>run.iterations</td><td>2</td><td>20</td>", differing)
    assert "trainer.lr" not in differing[: differing.index("</section>")]
    assert "recorded: training questions" in page
    assert "other: training questions" in page


def test_a_run_without_anything_has_a_sentence_in_each_section_and_no_frame(prices, tmp_path):
    run = tmp_path / "bare"
    run.mkdir()
    (run / "config.resolved.yaml").write_text("run: {name: bare, iterations: 3}\n")
    write_report([run], tmp_path / "bare.html", prices)
    page = (tmp_path / "bare.html").read_text()
    sections = re.findall(r'<section id="(\w+)">(.*?)</section>', page, re.DOTALL)
    assert len(sections) == len(SECTIONS)
    for name, body in sections:
        assert name == "settings" or 'class="missing"' in body, name
    assert "data-root-id" not in page
    assert "bokeh" not in page
    assert "observe.event_log=false" in unescape(page)
    assert numbers_in(page)["busy", "bare"] == "–"


def test_a_damaged_log_is_shown_up_to_the_damage_which_is_named(recorded_run, prices, tmp_path):
    run = shutil.copytree(recorded_run, tmp_path / "cut")
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    half = len(lines) // 2
    (run / "events.jsonl").write_text("".join([*lines[:half], "{broken\n", *lines[half:]]))
    (report,) = write_report([run], tmp_path / "cut.html", prices)
    assert report.facts.num_events == half
    assert f"line {half + 1}" in report.log_error
    assert f"line {half + 1}" in unescape((tmp_path / "cut.html").read_text())


EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b]0;owned\x07\u202eevil"


def test_hostile_text_reaches_the_page_only_as_text(prices, chromium, tmp_path):
    run = tmp_path / "hostile"
    run.mkdir()
    (run / "config.resolved.yaml").write_text(json.dumps({"run": {"name": "hostile", "iterations": 1, "note": EVIL}}))
    (run / "tokenizer").mkdir()
    tokenizer = Tokenizer(models.WordLevel({"a": 0, EVIL: 1}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(run / "tokenizer" / "tokenizer.json"))
    action = np.array([False, True])
    turn = {"turn": 0, "tool": "t", "status": "ok", "worker": "w", "stop_reason": "stop", "generated_tokens": 1}
    trajectory = Trajectory(
        trajectory_id=TrajectoryId(0, 0, 0, "train"), prompt=Prompt("q", ({"role": "user", "content": EVIL},), {}),
        token_ids=np.array([1, 1], np.int32), is_action=action, behaviour_logprob=np.zeros(2, np.float32),
        weight_version=np.array([-1, 0], np.int32), kv_version=np.array([-1, 0], np.int32), turns=[turn],
        end_reason=EndReason.FAILURE, failure=FailureClass.TOOL, failure_detail=EVIL, reward=math.nan, advantage=0.0,
    )  # fmt: skip
    with TrajectoryStore.create(run / "trajectories.zarr") as store:
        store.append([trajectory], batch=0)
    key = "trajectory-train-0-0-0-e0-hostile"
    with EventLog(run / "events.jsonl") as log:
        for event in (
            events.RunStarted("hostile", 0.0, 0, 0, 1, 1, "fifo", EVIL),
            events.WorkerCapacity("hostile", 0.0, EVIL, "", 1, 0, 0, 0.0, 0.0, 0.0, 0.0),
            events.VersionServed("hostile", 1.0, 0, EVIL, 0.1),
            events.TrajectoryParked("hostile", 1.0, key, "ROLLOUT", 0, 0, (0, 0), EVIL),
            events.QuantumDispatched("hostile", 1.0, key, "ROLLOUT", 0, EVIL, (0, 0), EVIL, True),
            events.QuantumFinished("hostile", 2.0, key, "ROLLOUT", 0, 1, EVIL, "ok", 0, 0.9, EVIL, 0, ""),
            events.QuantumDispatched("hostile", 2.0, key, "TOOL", 1, EVIL, (0, 0), EVIL, True),
            events.QuantumFinished("hostile", 3.0, key, "TOOL", 1, 0, EVIL, "ok", 0, 0.9, EVIL, 0, "failure"),
            events.FailureClassified("hostile", 3.0, key, "tool", EVIL),
            events.TrajectoryEnded("hostile", 3.0, key, False),
            events.SlotsSet("hostile", 4.0, EVIL, 1, 1, 1, EVIL),
            events.WorkerSetupFailed("hostile", 5.0, EVIL, EVIL, EVIL),
        ):
            log.write(event)
    output = tmp_path / "hostile.html"
    write_report([run], output, prices)
    page = output.read_text()
    assert "<img src=x" not in page
    assert "<script>alert" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert page.count("&lt;img src=x onerror=alert(2)&gt;") >= 6

    async def look():
        async with chromium(output.as_uri()) as opened:
            await opened.call(
                "Page.addScriptToEvaluateOnNewDocument", source="globalThis.alert = n => { globalThis.hit = n }"
            )
            await opened.call("Page.reload")
            await opened.until("document.documentElement.dataset.painted")
            return await opened.evaluate("globalThis.hit ?? null"), await opened.evaluate("document.images.length")

    assert asyncio.run(look()) == (None, 0)


def test_a_file_that_cannot_be_written_is_named_and_nothing_is_left(recorded_run, prices, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"-o .*report.html: cannot write"):
        write_report([recorded_run], tmp_path / "file" / "report.html", prices)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_report_of_a_running_run_counts_what_is_there(recorded_run, prices, tmp_path):
    run = shutil.copytree(recorded_run, tmp_path / "half")
    whole = read_events(run / "events.jsonl").events
    first_end = next(i for i, event in enumerate(whole) if event["name"] == "iteration_finished")
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    (run / "events.jsonl").write_text("".join(lines[: first_end + 1]) + lines[first_end + 1][:20])  # a torn last line
    (report,) = write_report([run], tmp_path / "half.html", prices)
    assert report.log_error == ""
    assert report.facts.num_events == first_end + 1
    quanta = Counter(event["phase"] for event in whole[: first_end + 1] if event["name"] == "quantum_finished")
    assert report.facts.run.quanta == quanta


def test_short_states_are_drawn_with_their_neighbours_and_no_time_is_lost():
    found = [(0.01 * i, 0.01 * (i + 1), "generating" if i % 3 else "tools") for i in range(3000)]
    bars = coarse({"a": found, "b": [(0.0, 30.0, "training")]}, 100)
    assert len(bars) <= 110
    for name in ("a", "b"):
        assert sum(stop - start for worker, start, stop, _ in bars if worker == name) == pytest.approx(30.0, rel=0.02)
    assert {state for worker, _, _, state in bars if worker == "a"} == {"generating"}
    assert coarse({"a": found[:3]}, 100) == [("a", *each) for each in found[:3]]


@pytest.fixture
def planned(tmp_path):
    """A run on GPUs whose planner changed the layout once: two engines for 1800 s, with what came of it."""
    run = tmp_path / "planned"
    run.mkdir()
    (run / "config.resolved.yaml").write_text("run: {name: planned, iterations: 2}\n")
    row = {"step": 0, "wall_time_s": 1.0, "reward": 0.5, "train_on_gpu": 1.0}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    considered = {
        "predicted_step_s": None, "realised_step_s": 10.0, "current_step_s": 10.0, "proposed_step_s": 8.0, "gain_s": 20.0,
        "cost_s": 1.0, "num_changes": 1, "remaining_iterations": 10, "required_gain_frac": 0.05, "rollout_factor": 1.0,
        "training_factor": 1.0, "train_gpus": 2, "engines": ((1, 2),), "accepted": True, "reason": "gain exceeds cost",
    }  # fmt: skip
    with EventLog(run / "events.jsonl") as log:
        for event in (
            events.RunStarted("planned", 0.0, 0, 0, 2, 1, "fifo", ""),
            *(
                events.WorkerCapacity("planned", 0.0, name, "", 1, 0, 0, 0.0, 0.0, 0.0, 0.0)
                for name in ("rollout-0", "rollout-1")
            ),
            events.PlanConsidered("planned", 5.0, 0, **considered),
            events.PlanRealised("planned", 9.0, 0, 3, 0.2, 0.17, 1, 2.5),
            events.IterationFinished("planned", 1800.0, 0, 0.5, 0.0),
        ):
            log.write(event)
    return run


def test_decisions_have_their_predicted_and_realised_gain(planned, prices, tmp_path):
    write_report([planned], tmp_path / "planned.html", prices)
    page = (tmp_path / "planned.html").read_text()
    rows = re.findall(
        r"<tr>(.*?)</tr>", page[page.index('<section id="decisions">') : page.index('<section id="mismatch">')]
    )
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows[1:]]
    assert [cell[2:4] for cell in cells] == [["20.0 %", "not carried out"], ["20.0 %", "17.0 %"]]
    assert "accepted" in cells[0][1]
    assert "cost 2.50 s" in cells[1][4]


def test_a_change_is_shown_with_what_the_iterations_around_it_took(planned, prices, tmp_path):
    def tokens(t_s, iteration):
        key = f"trajectory-train-{iteration}-0-0-e0-planned"
        yield events.QuantumFinished("planned", t_s, key, "ROLLOUT", 0, 100, "", "", 0, 0.1, "rollout-0", 0, "")
        yield events.IterationFinished("planned", t_s, iteration, 0.5, 0.0)

    with EventLog(planned / "events.jsonl") as log:
        slots = events.SlotsSet("planned", 1810.0, "rollout-0", 1, 8, 16, "asked for")
        for event in (*tokens(1810.0, 1), slots, *tokens(1900.0, 2), *tokens(1904.0, 3)):
            log.write(event)
    write_report([planned], tmp_path / "planned.html", prices)
    page = (tmp_path / "planned.html").read_text()
    assert "60.0 % (1 iterations against 1)" in page


def test_gpu_time_costs_what_the_named_gpu_costs_and_unknown_ones_are_asked_for(planned, prices, tmp_path):
    (asked,) = write_report([planned], tmp_path / "asked.html", prices)
    assert isinstance(asked.cost, str)
    assert "--gpu" in asked.cost
    (priced,) = write_report([planned], tmp_path / "priced.html", prices, gpu="h100_80g")
    assert priced.cost.total == pytest.approx(3 * 0.5 * prices.of("H100-80G").price)  # two engines, one training worker
    (other,) = write_report([planned], tmp_path / "other.html", prices, gpu="B300")
    assert isinstance(other.cost, str)
    assert "B300" in other.cost
    assert "--prices" in other.cost
