"""`libra report`: its figures against the event log, runs side by side, missing data, hostile text."""

import json
import math
import re
import shutil
from html import unescape

import numpy as np
import pytest
from made_events import CONSIDERED, an_iteration, worker_times
from tokenizers import Tokenizer, decoders, models

from factories import trajectory
from libra import facts
from libra.hardware.gpus import load_prices
from libra.observe.report import SECTIONS, write_report
from libra.observe.report.plots import coarse
from libra.store.event_log import EventLog
from libra.store.trajectory_store import TrajectoryStore
from libra.types import EndReason, FailureClass, Phase, Prompt


@pytest.fixture
def prices():
    return load_prices()


def numbers_in(page):
    """The marked numbers of a page: (name, run) -> text."""
    found = re.findall(r'<b data-libra="([^"]+)" data-run="([^"]+)">([^<]*)</b>', page)
    return {(name, run): unescape(text) for name, run, text in found}


def percent(share):
    return f"{100 * share:.1f} %"


def test_figures_are_those_of_the_log_and_runs_stand_side_by_side(made_run, prices, tmp_path):
    other = shutil.copytree(made_run, tmp_path / "other")
    config = other / "config.resolved.yaml"
    config.write_text(config.read_text().replace("iterations: 2", "iterations: 20"))
    write_report([made_run, other], tmp_path / "both.html", prices)
    page = (tmp_path / "both.html").read_text()
    found = numbers_in(page)
    shown = {name: text for (name, run), text in found.items() if run == "made"}
    assert shown == {name: text for (name, run), text in found.items() if run == "other"}
    times = worker_times(an_iteration(), ("train-0",)).times()
    assert shown["busy"] == shown["busy_share"] == percent(times.busy_frac)
    assert {name: shown[f"share_{name}"] for name in times.shares} == {n: percent(s) for n, s in times.shares.items()}
    assert (shown["tokens"], shown["iterations"], shown["reward"]) == ("15", "1", "0.500")
    hours = sum(times.gpu_s.values()) / 3600
    assert float(shown["cost"]) == pytest.approx(hours * prices.core_hour.price, abs=5e-5)
    differing = page[page.index('<section id="settings">') :]
    assert re.search(r"<td>run.iterations</td><td>2</td><td>20</td>", differing)
    assert "run.name" not in differing[: differing.index("</section>")]


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
    assert "has not started" in unescape(page)
    assert numbers_in(page)["busy", "bare"] == "–"


def test_a_damaged_log_is_shown_up_to_the_damage_which_is_named(made_run, prices, tmp_path):
    log, half = made_run / "events.jsonl", 11
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*lines[:half], "{broken\n", *lines[half:]]))
    (report,) = write_report([made_run], tmp_path / "cut.html", prices)
    assert (report.timeline.num_facts, report.timeline.quanta["ROLLOUT"]) == (half, 1)
    assert f"line {half + 1}" in report.log_error
    assert report.log_error in unescape((tmp_path / "cut.html").read_text())


EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b]0;owned\x07\u202eevil"


def test_hostile_text_reaches_the_page_only_as_text(prices, tmp_path):
    run = tmp_path / "hostile"
    run.mkdir()
    (run / "config.resolved.yaml").write_text(json.dumps({"run": {"name": "hostile", "iterations": 1, "note": EVIL}}))
    (run / "tokenizer").mkdir()
    tokenizer = Tokenizer(models.WordLevel({"a": 0, EVIL: 1}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(run / "tokenizer" / "tokenizer.json"))
    hostile = trajectory(
        lengths=(1, 1), prompt=Prompt("q", ({"role": "user", "content": EVIL},), {}), token_ids=np.array([1, 1], np.int32),
        turns=[{"turn": 0, "tool": "t", "status": "ok", "worker": "w", "stop_reason": "stop", "generated_tokens": 1}],
        end_reason=EndReason.FAILURE, failure=FailureClass.TOOL, failure_detail=EVIL, reward=math.nan, advantage=0.0,
    )  # fmt: skip
    with TrajectoryStore.create(run / "trajectories.zarr") as store:
        store.append([hostile], batch=0)
    key = "trajectory-train-0-0-0-e0-hostile"
    with EventLog(run / "events.jsonl") as log:
        for t_s, event in (
            (0.0, facts.RunStarted(0, 0, 1, 1, "fifo", EVIL)),
            (0.0, facts.WorkerCapacity(EVIL, "", 1)),
            (1.0, facts.VersionServed(0, EVIL, 0.1)),
            (1.0, facts.TrajectoryParked(key, 0, Phase.ROLLOUT, 0)),
            (1.0, facts.QuantumDispatched(key, Phase.ROLLOUT, EVIL, 0, (0, 0), EVIL, True)),
            (2.0, facts.QuantumFinished(key, Phase.ROLLOUT, 1, EVIL, "ok", 0.9, worker=EVIL)),
            (2.0, facts.QuantumDispatched(key, Phase.TOOL, EVIL, 1, (0, 0), EVIL, True)),
            (3.0, facts.QuantumFinished(key, Phase.TOOL, 0, EVIL, "ok", 0.9, worker=EVIL, end="failure")),
            (3.0, facts.FailureClassified(key, "tool", EVIL)),
            (3.0, facts.TrajectoryEnded(key, False)),
            (4.0, facts.SlotsSet(EVIL, 1, 1, 1, EVIL)),
            (5.0, facts.WorkerSetupFailed(EVIL, EVIL, EVIL)),
        ):
            log.write(facts.Line("hostile", t_s, event))
    output = tmp_path / "hostile.html"
    write_report([run], output, prices)
    page = output.read_text()
    assert "<img src=x" not in page
    assert "<script>alert" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert page.count("&lt;img src=x onerror=alert(2)&gt;") >= 6


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
    with EventLog(run / "events.jsonl") as log:
        for event in (
            facts.Line("planned", 0.0, facts.RunStarted(0, 0, 2, 1, "fifo", "")),
            *(facts.Line("planned", 0.0, facts.WorkerCapacity(name, "", 1)) for name in ("rollout-0", "rollout-1")),
            facts.Line("planned", 5.0, facts.PlanConsidered(0, accepted=True, **CONSIDERED)),
            facts.Line("planned", 9.0, facts.PlanRealised(0, 3, 0.2, 0.17, 1, 2.5)),
            facts.Line("planned", 1800.0, facts.IterationFinished(0, 0.5, 0.0)),
        ):
            log.write(event)
    return run


def test_decisions_have_their_predicted_and_realised_gain(planned, prices, tmp_path):
    def tokens(t_s, iteration):
        key = f"trajectory-train-{iteration}-0-0-e0-planned"
        yield facts.Line("planned", t_s, facts.QuantumFinished(key, Phase.ROLLOUT, 100, "", "", 0.1))
        yield facts.Line("planned", t_s, facts.IterationFinished(iteration, 0.5, 0.0))

    with EventLog(planned / "events.jsonl") as log:
        slots = facts.Line("planned", 1810.0, facts.SlotsSet("rollout-0", 1, 8, 16, "asked for"))
        for event in (*tokens(1810.0, 1), slots, *tokens(1900.0, 2), *tokens(1904.0, 3)):
            log.write(event)
    (priced,) = write_report([planned], tmp_path / "planned.html", prices, gpu="h100_80g")
    hours = 3 * 1904.0 / 3600  # two engines, one training worker
    assert priced.cost.total == pytest.approx(hours * prices.of("H100-80G").price)
    page = (tmp_path / "planned.html").read_text()
    first, end = page.index('<section id="decisions">'), page.index('<section id="mismatch">')
    rows = re.findall(r"<tr>(.*?)</tr>", page[first:end])
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows[1:]]
    assert [cell[2:4] for cell in cells[:2]] == [["20.0 %", "not carried out"], ["20.0 %", "17.0 %"]]
    assert "accepted" in cells[0][1] and "2.50 s" in cells[1][4]
    assert "60.0 %" in cells[2][3], "four seconds with the change where it had been ten"
