"""`libra inspect RUN --invariants`: each promise is seen to be broken, and plain zarr counts the same."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import plain_zarr_invariants
import pytest

from factories import trajectory
from libra.cli.main import main
from libra.config import config_from_dict, dump_config
from libra.errors import RunDirectoryError
from libra.observe.invariants import check_invariants
from libra.store.trajectory_store import TrajectoryStore
from libra.types import EndReason, FailureClass, TrajectoryId

Change = Callable[[TrajectoryId, dict[str, Any]], None]
ETA, SIZE, PROMPTS, BATCHES = 1, 2, 2, 5


def sound(tid, made):
    """Nothing is changed."""


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    """``a_run(change, sections)``: a run of five batches of two groups of two, read only.

    ``change`` may change the versions and fields of each trajectory; runs with the same change have
    the same store.
    """
    made = {}

    def configured(change=sound, sections=None):
        values = {
            "run": {"iterations": BATCHES, "eta": ETA}, "trainer": {"prompts": PROMPTS, "group_size": SIZE}
        }  # fmt: skip
        for section, keys in (sections or {}).items():
            values[section] = values.get(section, {}) | keys
        if change not in made:
            made[change] = stored(tmp_path_factory.mktemp("runs") / "demo", change, values["trainer"]["prompts"])
        (made[change] / "config.resolved.yaml").write_text(dump_config(config_from_dict(values)))
        return made[change]

    return configured


def stored(run, change, prompts):
    rng = np.random.default_rng(0)
    with TrajectoryStore.create(run / "trajectories.zarr") as store:
        for batch in range(BATCHES):
            members = []
            for group in range(prompts):
                for sample in range(SIZE):
                    tid = TrajectoryId(batch, group, sample)
                    begun = max(0, batch - group % 2)
                    made = {"versions": [begun] * int(rng.integers(3, 40))}
                    change(tid, made)
                    if not made.pop("missing", False):
                        members.append(trajectory(tid, **{"advantage": 0.5} | made))
            store.append(members, batch=batch)
        store.append([trajectory(TrajectoryId(0, 0, 0, "eval"), versions=[9])])
    return run


def first_group_is_late(tid, made):
    if tid[:2] == (4, 0):
        made["versions"] = [1] * 10 + [4] * 5


def dropped(tid, made):
    first_group_is_late(tid, made)
    made["advantage"] = 0.0 if tid[:2] == (4, 0) else 0.5


def a_sample_is_missing(tid, made):
    made["missing"] = tid == (2, 1, 1, "train")


def a_group_is_missing(tid, made):
    made["missing"] = tid[:2] == (2, 1)


def the_long_fail(tid, made):
    if tid.sample:
        made |= {"versions": [tid.iteration] * 200, "failure": FailureClass.TIMEOUT, "end_reason": EndReason.FAILURE}


CASES = {
    "sound": (sound, {}, {}),
    "late": (first_group_is_late, {}, {"lag <= eta": "BROKEN", "C1": "not promised", "C3": "BROKEN"}),
    "dropped": (
        dropped, {"staleness": {"over_age": "drop"}},
        {"C1": "not promised", "C2": "not promised", "C3": "not promised"},
    ),
    "not dropped": (
        first_group_is_late, {"staleness": {"over_age": "drop"}},
        {"lag <= eta": "BROKEN", "C1": "not promised", "C2": "not promised", "C3": "not promised"},
    ),
    "masked": (first_group_is_late, {"staleness": {"over_age": "mask"}}, {"C1": "not promised", "C3": "not promised"}),
    "corrected": (
        first_group_is_late, {"staleness": {"over_age": "correct"}},
        {"lag <= eta": "not promised", "C1": "not promised", "C3": "not promised"},
    ),
    "torn": (a_sample_is_missing, {}, {"whole groups": "BROKEN"}),
    "lost": (a_group_is_missing, {}, {"C2": "BROKEN"}),
    "unfinished": (a_group_is_missing, {"run": {"iterations": 9}}, {}),
    "wide": (
        first_group_is_late, {"staleness": {"over_age": "mask", "window": 2}},
        {"C1": "not promised", "C3": "not promised", "window": "BROKEN"},
    ),
    "biased": (the_long_fail, {"trainer": {"prompts": 6}}, {"lengths": "BROKEN"}),
}  # fmt: skip


def printed(act, capsys):
    code = 0
    try:
        act()
    except SystemExit as end:
        code = end.code
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("name", CASES)
def test_what_is_broken_is_seen_and_plain_zarr_counts_the_same(name, a_run, capsys):
    change, sections, expected = CASES[name]
    run = a_run(change, sections)
    promises = check_invariants(run)
    verdicts = {promise.name: promise.verdict for promise in promises if promise.verdict != "holds"}
    assert [*verdicts.values()] == [*expected.values()]
    assert all(full.startswith(short) for full, short in zip(verdicts, expected, strict=True))
    code, rows = printed(lambda: main(["inspect", str(run), "--invariants", "--json"]), capsys)
    assert code == int("BROKEN" in verdicts.values())
    _, plain = printed(lambda: plain_zarr_invariants.main(run), capsys)
    counted = [[(row["name"], row["broken"], row["of"]) for row in found] for found in (plain, rows)]
    assert counted[0] == counted[1]
    assert f"KS distance {plain[-1]['distance']:.6f}, p {plain[-1]['p']:.6g};" in rows[-1]["detail"]


def test_a_trajectory_that_is_there_twice_is_consumed_twice(a_run, tmp_path, monkeypatch):
    """The store refuses that; the count must not trust it."""
    run = shutil.copytree(a_run(), tmp_path / "demo")
    monkeypatch.setattr(TrajectoryStore, "_check_new", lambda store, ids: None)
    with TrajectoryStore.open(run / "trajectories.zarr", "a") as store:
        store.append([trajectory(TrajectoryId(1, 0, 0), versions=[1] * 4)], batch=4)
    broken = {promise.name: promise.broken for promise in check_invariants(run) if promise.verdict == "BROKEN"}
    assert (broken["consumed once"], broken["whole groups"]) == (1, 1)


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunDirectoryError):
        check_invariants(tmp_path / "nothing")


def test_the_plain_script_knows_nothing_of_libra():
    source = Path(plain_zarr_invariants.__file__).read_text()
    assert not [line for line in source.splitlines() if line.lstrip().startswith(("import libra", "from libra"))]
