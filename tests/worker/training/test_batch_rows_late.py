"""What a batch leaves for the next one: groups that wait for late rewards, and what guesses were worth by then."""

from types import SimpleNamespace
from typing import cast

from libra.policy.late_rewards import GuessWorth, WaitingGroup
from libra.store.run_records import commit_batch
from libra.types import TrajectoryId
from libra.worker.run_spec import RunFiles
from libra.worker.training.batch_rows import waiting_after, waiting_row, worth_after


def test_groups_and_the_worth_of_guesses_are_read_back_from_the_file_of_a_batch(tmp_path):
    files = cast(RunFiles, SimpleNamespace(batches_dir=tmp_path))
    group = WaitingGroup(3, 1, 4, (0, 2), {1: 0.5}, guess_weight=0.25)
    of_an_older_run = [3, 0, 4, [1], {}]
    late = {"waiting": [waiting_row(group), of_an_older_run], "worth": [2.0, 8.0]}
    commit_batch(tmp_path, 0, [TrajectoryId(0, 0, 0)])
    commit_batch(tmp_path, 1, [TrajectoryId(1, 0, 0)], late=late)
    assert waiting_after(files, 1) == [group, WaitingGroup(3, 0, 4, (1,), {}, guess_weight=1.0)]
    assert worth_after(files, 1) == GuessWorth(2.0, 8.0) and worth_after(files, 1).slope == 0.25
    assert worth_after(files, 0) == worth_after(files, -1) == GuessWorth()
