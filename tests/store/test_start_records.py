"""Epochs fence off older starts of a run."""

import subprocess
import sys

import pytest

from libra.errors import FencedOff, StoreError
from libra.store.start_records import Epoch, newest_epoch, take_epoch

EACH = 100
TAKER = f"""
import sys
from pathlib import Path
from libra.store.start_records import take_epoch
print("ready", flush=True)
sys.stdin.readline()
print(*(take_epoch(Path(sys.argv[1])).number for _ in range({EACH})))
"""


def test_epochs_count_from_0_and_each_start_takes_the_next(tmp_path):
    directory = tmp_path / "run" / "epochs"
    assert newest_epoch(directory) == -1
    directory.mkdir(parents=True)
    (directory / ".0001.abc.tmp").touch()  # what a start leaves that died while taking one
    (directory / "notes").touch()
    assert [take_epoch(directory).number for _ in range(12)] == list(range(12))
    assert newest_epoch(directory) == 11
    (tmp_path / "epochs").touch()
    with pytest.raises(StoreError, match="epochs/0000"):
        take_epoch(tmp_path / "epochs")


def test_only_the_newest_holder_may_go_on_and_an_older_one_gets_the_number_of_the_newest(tmp_path):
    directory = tmp_path / "my_run" / "epochs"
    first = take_epoch(directory)
    first.check()
    second = take_epoch(directory)
    third = take_epoch(directory)
    third.check()
    for old in (first, second):
        with pytest.raises(FencedOff, match=rf"epoch {old.number} has ended.* as epoch 2"):
            old.check()
    with pytest.raises(PermissionError):  # what a caller who knows nothing of us would catch
        Epoch(directory, 0).check()


@pytest.mark.live
def test_two_processes_at_once_never_take_the_same(tmp_path):
    command = [sys.executable, "-c", TAKER, str(tmp_path / "epochs")]
    takers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for taker in takers:
        assert taker.stdout is not None and taker.stdout.readline() == "ready\n"
    for taker in takers:  # both are at the gate
        assert taker.stdin is not None
        taker.stdin.write("go\n")
        taker.stdin.flush()
    taken = [[int(number) for number in taker.communicate()[0].split()] for taker in takers]
    assert [taker.returncode for taker in takers] == [0, 0]
    assert sorted(taken[0] + taken[1]) == list(range(2 * EACH))
    assert all(numbers == sorted(numbers) for numbers in taken)
