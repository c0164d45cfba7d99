"""``libra replay``: what a newcomer reads, and what wrong input is told."""

import json

import pytest

from libra import facts
from libra.policy import Admission, CommittedGroup, Fifo
from libra.store.event_log import EventLog
from libra.types import Phase

KEY = "trajectory-train-0-0-{}-e0-demo"


def small_run():
    """One iteration of two trajectories, as the plugin would log it, by calling the policy objects."""
    admission, fifo, log = Admission(0, 1), Fifo(), list[facts.Line]()

    def note(*told):
        log.extend(facts.Line("demo", 0.25 * (len(log) + place), fact) for place, fact in enumerate(told))

    def park(sample, phase, quanta):
        parked = facts.TrajectoryParked(KEY.format(sample), 0, phase, quanta)
        note(parked, *fifo.handle(parked))

    note(facts.RunStarted(0, 0, 1, 1, "fifo", "tool_arithmetic"))
    note(facts.PolicySnapshot("fifo", "tool_arithmetic", fifo.snapshot(), admission.snapshot()))
    admission.version_published(0)
    note(facts.VersionPublished(0, "d0", 1), facts.GateParked(0), *admission.gate_parked(0))
    for sample in range(2):
        park(sample, Phase.ROLLOUT, 0)
    for sample in range(2):
        admission.generation_started(0, 0, 0)
        place = (0, 0, sample)
        note(
            facts.QuantumDispatched(KEY.format(sample), Phase.ROLLOUT, "rollout-0", 0, place, "first home", alone=False)
        )
        note(facts.QuantumFinished(KEY.format(sample), Phase.ROLLOUT, 7, "", "", 0.5, worker="rollout-0", version=0))
    note(facts.PolicySnapshot("fifo", "tool_arithmetic", fifo.snapshot(), admission.snapshot()))
    park(1, Phase.TOOL, 1)
    admission.batch_parked(0)
    note(facts.BatchParked(0), facts.GroupCommitted("train", 0, 0, 0, 0.5, {}))
    note(*admission.group_committed(CommittedGroup(0, 0, 0)), facts.TrajectoryEnded(KEY.format(0), completed=True))
    return log


def write(run_dir, log):
    with EventLog(run_dir / "events.jsonl") as file:
        for event in log:
            file.write(event)
    return run_dir


@pytest.fixture
def run_dir(tmp_path):
    return write(tmp_path / "demo", small_run())


def test_a_sound_log_is_reproduced(libra, run_dir):
    code, out, err = libra("replay", run_dir)
    assert (code, err) == (0, "")
    assert "20 events with 5 decisions" in out
    assert "3 priorities, 1 gate openings, 1 batch openings; 1 snapshots compared" in out
    assert "Every decision was reproduced." in out
    assert f"libra replay {run_dir} --key KEY" in out


def test_a_trajectory_is_followed_by_any_of_its_names(libra, run_dir):
    for name in ("train-0-0-1", "trajectory-train-0-0-1", KEY.format(1)):
        code, out, _ = libra("replay", run_dir, "--key", name)
        assert code == 0
        story = out[out.index("Trajectory-train-0-0-1") :]
        assert "waits for ROLLOUT after 0 quanta" in story
        assert "has priority 0, 0, 1: fifo: place of first arrival" in story
        assert "gets a ROLLOUT slot on rollout-0" in story
        assert "waits for TOOL after 1 quanta" in story
        assert KEY.format(0) not in story


def test_a_decision_is_told_with_its_reason_before_and_after(libra, run_dir):
    code, out, _ = libra("replay", run_dir, "--decision", 16, "--decision", 19)
    assert code == 0
    place, batch = out.split("Line 16: ")[1].split("Line 19: ")
    assert "before: [0, 0, 1]" in place and "after:  [0, 0, 1]" in place
    assert "reason: fifo: place of first arrival" in place
    assert "replay: the same decision" in place
    assert "members: group 0 of iteration 0" in batch
    assert "event:  line 18, group 0 of iteration 0 (train) is committed" in batch
    assert "version 0 is published" in batch


def test_forecasts_and_changes_are_told_with_what_came_of_them(libra, tmp_path):
    key, other = KEY.format(1), KEY.format(0)

    def forecast(of, left):
        return facts.Line("demo", 1.0, facts.Prefer(of, (), f"{left} tokens left", left, 90))

    def turn(of, tokens):
        return facts.Line("demo", 1.0, facts.QuantumFinished(of, Phase.ROLLOUT, tokens, "", "", 0.1))

    log = [
        forecast(key, 40), turn(other, 50), turn(key, 7), forecast(key, 20), turn(key, 30),
        facts.Line("demo", 2.0, facts.TrajectoryEnded(key, True)),
        forecast(other, 10), facts.Line("demo", 3.0, facts.SlotsSet("rollout-0", 1, 4, 8, "asked for")),
    ]  # fmt: skip
    _, out, _ = libra("replay", write(tmp_path / "run", log), "--key", "train-0-0-1", "--key", "train-0-0-0")
    told = [line.rpartition("; realised: ")[2] for line in out.splitlines() if "realised" in line]
    assert told == ["37 tokens", "30 tokens", "not known yet"]
    run = write(tmp_path / "other", [*small_run(), log[-1]])
    _, out, _ = libra("replay", run)
    told = "rollout-0 takes at most 4 trajectories at once: asked for; not known: no comparable iteration before it"
    assert "Plans, roles and limits: 1 decisions:" in out and told in out
    _, out, _ = libra("replay", run, "--json")
    assert [change["realised_frac"] for change in json.loads(out)["changes"]] == [None]


def test_a_changed_decision_is_exit_code_1_with_the_difference(libra, run_dir, tmp_path):
    path = run_dir / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[8] = lines[8].replace('"priority":[0,0,1]', '"priority":[0,0,5]')
    path.write_text("".join(lines))
    code, out, err = libra("replay", run_dir)
    assert (code, err) == (1, "")
    assert "The first is in line 8:" in out
    assert "priority was [0, 0, 5], now [0, 0, 1]" in out
    code, out, _ = libra("replay", run_dir, "--json")
    assert code == 1 and json.loads(out)["first_difference"]["line"] == 8


def test_a_replay_from_the_snapshot_says_so(libra, run_dir):
    path = run_dir / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(("not JSON at all\n", *lines[1:])))
    code, out, _ = libra("replay", run_dir, "--from-snapshot")
    assert code == 0
    assert "7 events from line 14, the last snapshot, with 2 decisions" in out
    code, _, err = libra("replay", run_dir)
    assert code == 2 and "events.jsonl, line 1: not JSON" in err


def test_a_log_that_breaks_off_before_the_answers_is_no_difference(libra, tmp_path):
    code, out, _ = libra("replay", write(tmp_path / "demo", small_run()[:18]))
    assert code == 0
    assert "ends after line 18" in out and "Every decision was reproduced." in out
