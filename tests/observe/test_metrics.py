"""What was measured is on disk, as JSON lines."""

import json

import pytest

from libra.errors import StoreError
from libra.observe.metrics import MetricsLog, read_metrics


def test_each_line_is_on_disk_at_once_and_a_later_log_continues(tmp_path):
    times = iter([10.0, 20.0, 30.0])
    log = MetricsLog(tmp_path, clock=lambda: next(times))
    log.write(0, {"reward/mean": 0.5, "tokens": 128})
    assert read_metrics(tmp_path) == [{"step": 0, "wall_time_s": 10.0, "reward/mean": 0.5, "tokens": 128}]
    log.close()
    log.close()
    with MetricsLog(tmp_path, clock=lambda: next(times)) as log:
        log.write(1, {"reward/mean": 0.75})
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1]


def test_what_json_has_no_word_for_is_null(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write(0, {"nan": float("nan"), "inf": float("inf")})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    read = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (read["nan"], read["inf"]) == (None, None)


@pytest.mark.parametrize("values", [{"step": 1.0}, {"reward": "high"}, {"reward": None}])
def test_a_value_that_is_no_number_is_named_and_not_written(tmp_path, values):
    with MetricsLog(tmp_path) as log, pytest.raises(StoreError, match=repr(next(iter(values)))):
        log.write(0, values)
    assert read_metrics(tmp_path) == []


def test_a_torn_last_line_is_left_out(tmp_path, caplog):
    with MetricsLog(tmp_path) as log:
        log.write(0, {"reward": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "rew')
    assert [line["step"] for line in read_metrics(tmp_path)] == [0]
    assert "torn" in caplog.text
