"""Metrics are on disk as JSON lines; trackers get them by group, with settings and texts; a failing
tracker ends nothing."""

import json
import logging
import math
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from factories import trajectory
from libra.config import config_from_dict
from libra.errors import ConfigError, StoreError
from libra.observe import metrics as module
from libra.observe.metrics import MAX_CHARS, MetricsLog, Trackers, grouped, read_metrics, sample_texts, settings_of


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


CONFIG = {
    "run": {"name": "demo", "seed": 7, "from_checkpoint": None},
    "trainer": {"lr": 0.5, "adam_args": {"weight_decay": 0.5}},
    "observe": {"trackers": ["tensorboard"]},
}
TEXT = "what is <b>2+2</b>?\n# 4"

# A tracker in a process of its own: its library may leave threads and processes behind. Arguments: name, directory.
WRITE = """
import json, pathlib, sys
from libra.observe.metrics import MetricsLog, Trackers
name, directory, config, text = sys.argv[1], pathlib.Path(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
trackers = Trackers((name,), directory, "demo", config)
with MetricsLog(directory, trackers) as log:
    for step in range(3):
        log.write(step, {"reward": step / 4, "train_s": 1.5, "loss": float("nan") if step == 1 else 0.5})
    log.write(3, {"evaluation/reward": 0.875, "evaluation/reward/1 operation": 1.0})
    trackers.texts(3, {"samples/best": text})
    assert trackers, "it failed"
"""


def written_by(name, directory):
    done = subprocess.run(
        [sys.executable, "-c", WRITE, name, directory, json.dumps(CONFIG), TEXT],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-2000:]
    assert "gets nothing more" not in done.stderr


def test_every_metric_of_a_run_has_a_group_and_none_hides_another(recorded_run):
    names = {name for line in read_metrics(recorded_run) for name in line} - {"step", "wall_time_s"}
    names |= {"resampled/tool", "evaluation/reward/1 operation", "plan/proposed_step_s", "forecast_skill"}
    groups = {grouped(name): name for name in names}
    assert len(groups) == len(names)
    assert {name.split("/")[0] for name in groups} == {"reward", "train", "time", "lag", "failures", "forecast", "plan"}
    assert grouped("tokens_per_s") == "time/tokens_per_s"
    assert grouped("evaluation/reward/1 operation") == "reward/held_out_by/1 operation"
    assert grouped("a_metric_of_my_own") == "train/a_metric_of_my_own"


def test_settings_are_plain_values_of_the_sections_that_matter():
    assert settings_of(CONFIG) == {
        "run.name": "demo", "run.seed": 7, "trainer.lr": 0.5, "trainer.adam_args": "{'weight_decay': 0.5}"
    }  # fmt: skip


@pytest.mark.live
def test_tensorboard_has_groups_settings_and_texts(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    written_by("tensorboard", tmp_path)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(scalar.step, scalar.value) for scalar in board.Scalars("reward/mean")] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert [scalar.value for scalar in board.Scalars("time/train_s")] == [1.5, 1.5, 1.5]
    assert math.isnan(board.Scalars("train/loss")[1].value)
    assert [scalar.value for scalar in board.Scalars("reward/held_out")] == [0.875]
    ((text,),) = (event.tensor_proto.string_val for event in board.Tensors("samples/best/text_summary"))
    assert text.decode().splitlines() == [f"    {line}" for line in TEXT.splitlines()]  # Markdown shows it as it is
    about = board.SummaryMetadata(metadata.SESSION_START_INFO_TAG)
    told = metadata.parse_session_start_info_plugin_data(about.plugin_data.content).hparams
    assert (told["trainer.lr"].number_value, told["run.name"].string_value) == (0.5, "demo")


def test_a_run_tracks_its_numbers_settings_and_a_sample_of_its_last_iteration(recorded_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(recorded_run / "tensorboard"))
    board.Reload()
    rows = {line["step"]: line for line in read_metrics(recorded_run) if "reward" in line}
    expected = [(step, pytest.approx(row["reward"])) for step, row in rows.items()]
    assert [(s.step, s.value) for s in board.Scalars("reward/mean")] == expected
    names = {"train/loss", "time/iteration_s", "lag/mean", "failures/all", "reward/held_out"}
    assert names <= set(board.Tags()["scalars"])
    texts = board.Tensors("samples/best/text_summary")
    assert [event.step for event in texts] == sorted(rows)  # the first of ten iterations, and the last of the run
    assert b"reward" in texts[-1].tensor_proto.string_val[0]
    assert board.SummaryMetadata("_hparams_/session_start_info").plugin_data.plugin_name == "hparams"


class Failing:
    """A tracker whose service goes away after the first numbers."""

    def __init__(self, directory, run, settings):
        self.calls = []

    def numbers(self, step, wall_time_s, values):
        self.calls.append(step)
        if step:
            raise ConnectionError("no route to host\nand a second line")

    def close(self):
        pass


def test_a_tracker_that_fails_is_one_warning_and_the_others_go_on(tmp_path, monkeypatch, caplog):
    class Whole(Failing):
        def numbers(self, step, wall_time_s, values):
            written.append(step)

    def refuses(*_):
        raise OSError("no space left on device")

    written = []
    monkeypatch.setattr(module, "TRACKERS", {"tensorboard": refuses, "wandb": Failing})
    monkeypatch.setitem(sys.modules, "my_trackers", SimpleNamespace(Whole=Whole))
    with (
        caplog.at_level(logging.WARNING),
        MetricsLog(tmp_path, Trackers(("tensorboard", "wandb", "my_trackers:Whole"), tmp_path, "demo", CONFIG)) as log,
    ):
        for step in range(3):
            log.write(step, {"reward": 0.5})
    messages = [record.getMessage() for record in caplog.records]
    assert [re.findall(r"^\w+|[A-Z]\w+Error", each) for each in messages] == [
        ["tensorboard", "OSError"], ["wandb", "ConnectionError"]
    ]  # fmt: skip
    assert not any("\n" in each for each in messages)
    assert len(read_metrics(tmp_path)) == 3 and written == [0, 1, 2]


def test_a_tracker_that_is_not_installed_is_refused_before_anything_starts(monkeypatch, tmp_path):
    from libra.driver.run_session import run

    found = module.importlib.util.find_spec
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None if name == "wandb" else found(name))
    with pytest.raises(ConfigError, match="pip install wandb"):
        run(config_from_dict({"run": {"dir": str(tmp_path)}, "observe": {"trackers": ["wandb"]}}))
    assert not list(tmp_path.iterdir())


def test_samples_are_the_best_and_the_worst_and_act_on_no_reader():
    members = [trajectory(seed=seed, reward=reward) for seed, reward in enumerate((0.25, 1.0, math.nan))]
    texts = sample_texts(members, lambda ids: "\x1b[31mred" + "x" * (MAX_CHARS + 1))
    assert set(texts) == {"samples/best", "samples/worst"}
    assert "reward 1," in texts["samples/best"].splitlines()[0]
    assert "reward 0.25," in texts["samples/worst"].splitlines()[0]
    assert "\x1b" not in texts["samples/best"]
    assert len(texts["samples/best"]) < MAX_CHARS + 200
    assert sample_texts(members[2:], str) == {}
