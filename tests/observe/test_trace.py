"""`libra trace`: the trace of an iteration made by hand, and of a real run, against the event log."""

import gzip
import itertools
import json
from collections import defaultdict

import pytest
from made_events import an_iteration, worker_times

from libra import facts
from libra.errors import ConfigError, StoreError
from libra.observe.timeline.recorded import read_log
from libra.observe.trace import STATE_TID, trace_lines, write_trace

TRAINERS = ("train-0",)


REAL = pytest.mark.live


@pytest.fixture(params=["made", pytest.param("run", marks=REAL)])
def log(request):
    if request.param == "made":
        return an_iteration()
    return list(read_log(request.getfixturevalue("recorded_run") / "events.jsonl"))


def names_of(lines, what):
    return {(line["pid"], line["tid"]): line["args"]["name"] for line in lines if line["name"] == what}


def test_the_trace_has_every_quantum_step_sync_and_state(log):
    lines = list(trace_lines(log, TRAINERS))
    processes = {pid: name for (pid, _), name in names_of(lines, "process_name").items()}
    assert sorted(processes.values()) == ["rollout-0", "run", "tool-0", "train-0"]
    threads = names_of(lines, "thread_name")
    slices = [line for line in lines if line["ph"] == "X"]
    quanta = [line for line in slices if threads[line["pid"], line["tid"]].split()[0] in ("ROLLOUT", "TOOL")]
    finished = [line.fact for line in log if isinstance(line.fact, facts.QuantumFinished)]
    assert len(quanta) == len(finished) > 0
    assert sum(line["args"]["tokens"] for line in quanta) == sum(event.tokens for event in finished)
    named = [line["name"] for line in slices]
    assert {f"step {line.fact.step}" for line in log if isinstance(line.fact, facts.StepFinished)} <= set(named)
    served = [line.fact.version for line in log if isinstance(line.fact, facts.VersionServed)]
    assert {f"load version {version}" for version in served} <= set(named)
    states = defaultdict(float)
    for line in slices:
        if line["tid"] == STATE_TID and processes[line["pid"]] != "run":
            states[processes[line["pid"]], line["name"]] += line["dur"] / 1e6
    workers = worker_times(log, TRAINERS).times().workers
    expected = {(worker.worker, state): value for worker in workers for state, value in worker.seconds.items()}
    assert states == {key: pytest.approx(value, abs=1e-3) for key, value in expected.items()}


def test_slices_of_a_line_do_not_overlap_and_counters_end_at_zero(log):
    lines = list(trace_lines(log, TRAINERS))
    by_line = defaultdict(list)
    for line in lines:
        if line["ph"] == "X":
            assert line["ts"] >= 0
            assert line["dur"] >= 0
            by_line[line["pid"], line["tid"]].append((line["ts"], line["ts"] + line["dur"]))
    for found in by_line.values():
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(sorted(found)))
    counters = defaultdict(list)
    for line in lines:
        if line["ph"] == "C":
            counters[line["name"]].append(line["args"])
    assert max(values["open"] for values in counters["open trajectories"]) > 0
    assert counters["open trajectories"][-1] == {"open": 0}
    assert counters["waiting by phase"][-1] == {"ROLLOUT": 0, "TOOL": 0}
    assert all(count >= 0 for values in counters["waiting by level"] for count in values.values())


def test_the_file_is_json_compressed_on_request_and_absent_after_an_error(log, tmp_path):
    for name in ("trace.json", "trace.json.gz"):
        count = write_trace(log, tmp_path / name, TRAINERS)
        opened = gzip.open if name.endswith(".gz") else open
        with opened(tmp_path / name, "rt") as file:
            assert len(json.load(file)["traceEvents"]) == count > 0

    def damaged():
        yield from log[:15]
        raise StoreError("line 16: not JSON")

    with pytest.raises(StoreError):
        write_trace(damaged(), tmp_path / "damaged.json")
    with pytest.raises(ConfigError, match="-o "):
        write_trace(log, tmp_path / "trace.json" / "x.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.json", "trace.json.gz"]
