"""Delivered rewards: the first one counts, whoever writes; a changed file is refused."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from libra.errors import RecordExists, StoreError
from libra.store.run_records import LATE, came, read_late, write_late
from libra.types import TrajectoryId

ONE = TrajectoryId(3, 0, 7)
NO_NUMBER = lambda _: b'{"schema": 1, "trajectory": [3, 0, 7, "train"], "value": NaN}'  # noqa: E731


def test_of_many_deliveries_one_counts(tmp_path):
    def deliver(value):
        try:
            write_late(tmp_path / "late", ONE, float(value))
        except RecordExists:
            return None
        return value

    with ThreadPoolExecutor(8) as pool:
        first = [value for value in pool.map(deliver, range(8)) if value is not None]
    assert [read_late(tmp_path / "late", ONE)] == first
    assert came(tmp_path / "late", [ONE, ONE._replace(sample=0)]) == {ONE: float(first[0])}
    assert [path.name for path in (tmp_path / "late").iterdir()] == [f"{ONE}.json"]


@pytest.mark.parametrize(
    "harm", [lambda text: text.replace(b"0.25", b"0.75"), lambda text: text[:-10], lambda _: b"{}", NO_NUMBER]
)
def test_a_changed_file_says_what_to_do(harm, tmp_path):
    path = write_late(tmp_path / "late", ONE, 0.25)
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(StoreError, match=r"libra deliver .* train-3-0-7 VALUE"):
        read_late(tmp_path / "late", ONE)


def test_a_file_of_another_trajectory_is_refused(tmp_path):
    other = ONE._replace(sample=2)
    write_late(tmp_path, other, 1.0).rename(LATE.path(tmp_path, ONE))
    with pytest.raises(StoreError, match=r"of train-3-0-2.*of train-3-0-7"):
        read_late(tmp_path, ONE)
