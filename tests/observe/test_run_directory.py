"""`libra runs`, and the commands around a run directory: what they print and what they refuse."""

import json
import shutil

import pytest

from libra import facts
from libra.observe.recorded_run import RecordedRun
from libra.observe.run_directory import list_runs, read_config
from libra.store.exclusive_files import CommitterLock
from libra.store.start_records import log_start, write_given
from libra.types import Phase


@pytest.fixture
def runs(tmp_path):
    """A directory with a finished run, one that was stopped, and one that is new."""
    for name, ended, wall_time_s in (("done", 3, 3000.0), ("stopped", 1, 2000.0), ("fresh", 0, 0.0)):
        run = tmp_path / name
        run.mkdir()
        (run / "config.resolved.yaml").write_text(f"run: {{name: {name}, iterations: 3}}\n")
        rows = [{"step": k, "wall_time_s": wall_time_s + k, "reward": 0.25 * k} for k in range(ended)]
        if rows:
            (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "done" / "evaluations").mkdir()
    (tmp_path / "done" / "evaluations" / "version-000003.json").write_text('{"version": 3, "reward": 0.75}')
    (tmp_path / "done" / "evaluations" / "version-000004.json").write_text("{broken")
    (tmp_path / "not_a_run").mkdir()
    return tmp_path


FINISHED = facts.to_json(
    facts.Line("done", 1.0, facts.QuantumFinished("trajectory-train-0-0-0-e0-done", Phase.ROLLOUT, 4, "", "", 0.5))
)


@pytest.mark.parametrize(("old", "new"), [('"ROLLOUT"', '"SLEEP"'), ("0.5", "1e999"), ("0.5", "[" * 3000 + "]" * 3000)])
@pytest.mark.parametrize("command", ["trace", "replay", "report"])
def test_an_event_with_changed_values_is_named_with_its_line(old, new, command, runs, libra):
    begun = facts.to_json(facts.Line("done", 0.0, facts.RunStarted(0, 1, 3, 2, "fifo", "demo")))
    (runs / "done" / "events.jsonl").write_text(f"{begun}\n{FINISHED.replace(old, new)}\n{FINISHED}\n")
    code, _, err = libra(command, runs / "done")
    assert "events.jsonl, line 2: " in err and len(err.strip().splitlines()) <= 3
    assert (code == 0) == (command == "report"), "a report shows the events before it"


def test_runs_are_listed_with_state_iterations_and_rewards(runs, libra):
    found = {row.name: (row.state, row.iterations, row.reward, row.evaluation) for row in list_runs(runs)}
    assert found == {
        "done": ("finished", 3, 0.5, 0.75), "stopped": ("stopped", 1, 0.0, None), "fresh": ("new", 0, None, None),
    }  # fmt: skip
    code, out, _ = libra("runs", runs)
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split()[:3] == ["run", "state", "iterations"]
    assert [line.split()[0] for line in lines[1:]] == ["fresh", "done", "stopped"]  # a new run by its start
    assert max(map(len, lines)) <= 80
    code, out, _ = libra("runs", runs, "--json")
    assert [json.loads(line)["state"] for line in out.splitlines()] == ["new", "finished", "stopped"]


def test_a_run_without_its_last_evaluation_is_not_finished(runs, libra):
    config = runs / "done" / "config.resolved.yaml"
    config.write_text(config.read_text() + "evaluation: {prompts: 2}\n")
    assert {row.name: row.state for row in list_runs(runs)}["done"] == "finished"
    (runs / "done" / "evaluations" / "version-000003.json").unlink()
    assert ("done", "unevaluated") in [tuple(line.split()[:2]) for line in libra("runs", runs)[1].splitlines()]


@pytest.mark.parametrize(("file", "damage"), [
    ("config.resolved.yaml", b"run: {iterations: many}\n"),
    ("config.resolved.yaml", b"run: \xff\n"),
    ("metrics.jsonl", b'{"step": 0, "reward": 0.5, "wall_time_s": "now"}\n'),
    ("metrics.jsonl", b'{"step": 0, "reward": 0.5, "wall_time_s": NaN}\n'),
    ("evaluations/version-000003.json", b'{"version": 1e400, "reward": 1.0}'),
    ("evaluations/version-000003.json", b"[" * 100_000),
    ("starts.jsonl", b'{"epoch": 0, "iterations": "many"}\n'),
])  # fmt: skip
def test_a_damaged_run_does_not_keep_the_others_from_the_list(file, damage, runs, libra):
    (runs / "done" / file).write_bytes(damage)
    for options in ([], ["--json"]):
        code, out, err = libra("runs", runs, *options)
        assert code == 0
        assert all(name in out for name in ("done", "stopped", "fresh"))
        assert "Traceback" not in err


def test_a_run_with_a_living_driver_is_running(runs):
    lock = CommitterLock(runs / "stopped" / "driver")
    try:
        assert {row.name: row.state for row in list_runs(runs)}["stopped"] == "running"
    finally:
        lock.release()
    assert {row.name: row.state for row in list_runs(runs)}["stopped"] == "stopped"


def test_iterations_that_were_typed_for_a_resume_are_the_goal(runs):
    write_given(runs / "done", (runs / "done" / "config.resolved.yaml").read_text(), environment=False, score=False)
    log_start(runs / "done", 0)
    assert {row.name: (row.state, row.of_iterations) for row in list_runs(runs)}["done"] == ("finished", 3)
    page = RecordedRun(runs / "done")
    assert page.snapshots()[0]["iterations"] == 3
    log_start(runs / "done", 1, 5)
    assert (page.snapshots()[0]["iterations"], page.snapshots()[0]["state"]) == (5, "stopped")
    assert {row.name: (row.state, row.of_iterations) for row in list_runs(runs)}["done"] == ("stopped", 5)
    log_start(runs / "done", 2)
    assert read_config(runs / "done")["run"]["iterations"] == 3


def test_a_directory_of_runs_is_answered_with_one_of_them(runs, libra):
    code, _, err = libra("report", runs)
    assert code == 2
    assert f"type libra report {runs / 'stopped'}" in err
    code, out, _ = libra("runs", runs / "not_a_run")
    assert (code, out) == (0, f"{runs / 'not_a_run'}: no run here; libra run CONFIG makes one\n")


def test_report_and_trace_of_a_run_are_written_into_it(recorded_run, tmp_path, libra):
    run = shutil.copytree(recorded_run, tmp_path / "copied")
    code, out, _ = libra("report", run)
    assert code == 0
    assert out.startswith(f"{run / 'report.html'}: ")
    assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")
    code, out, _ = libra("trace", run)
    assert code == 0
    assert out.startswith(f"{run / 'trace.json'}: ")
    code, out, _ = libra("inspect", run, "--html", tmp_path / "page.html", "--limit", "2")
    assert code == 0
    assert (tmp_path / "page.html").read_text().count("<section>") == 2
    code, out, _ = libra("inspect", run, "--index", "0")
    assert max(len(line) for line in out.splitlines() if line.startswith((" ", "turn"))) <= 80
