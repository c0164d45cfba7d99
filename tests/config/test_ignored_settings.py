"""Settings without effect are reported: every field is in the table, and a report is there exactly where a need is not met."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest

from libra.cli.main import main
from libra.config import RunConfig, config_from_dict, load_config
from libra.config.effect_conditions import Need, Situation
from libra.config.effects import READ, default_of, ignored_settings, warning_lines
from libra.config.field_help import field_references, sections
from libra.config.own_parts import OwnOr
from libra.errors import ConfigError

# Another value for each field than its default, where one cannot be made from its type.
OTHER: dict[str, Any] = {
    "planner.trained_frac": 0.5,
    "run.name": "another",
    "model.path": "some/model",
    "model.master_dtype": None,
    "environment.name": "jsonl",
    "environment.args": {"path": "x"},
    "services.named": {"judge": {"model": "some/model"}},
    "rollout.max_new_tokens": 32,
    "rollout.max_context_tokens": 512,
    "rollout.temperature": 0.5,
    "staleness.window": 2,
    "staleness.in_flight": 1,
    "trainer.clip_low": 0.5,
    "trainer.lora_targets": ("q_proj",),
    "trainer.correction_low": 0.5,
    "trainer.betas": (0.8, 0.9),
    "trainer.ewma_decay": 0.5,
    "trainer.gamma": 0.5,
    "trainer.vespo_positive": (1.0, 2.0),
    "trainer.vespo_negative": (1.0, 2.0),
    "trainer.correction": "truncate",
    "policy.boundaries_tokens": {"tp1": 3000.0},
    "cluster.engines": ({"tp": 1, "count": 2},),
    "cluster.dashboard_names": ("gateway.example",),
    "slurm.port": 99,
    "simulation.layout": {"tp4": 1},
    "planner.tp": [1],
    "planner.fixed_engines": {1: 2},
    "planner.generated_p99_tokens": 9999.0,
    "planner.generated_p50_tokens": 2000.0,
    "rollout.max_turns": 3,
    "trainer.max_row_tokens": 256,
    "environment.tools": {"mcp": "python my_server.py"},
    "environment.tools_env": ("NAME",),
    "agent.env": ("NAME",),
}
# What makes fields legal together; the cross-field checks refuse some values alone.
WITH: dict[str, dict[str, Any]] = {
    "trainer.aggregation": {"trainer.loss_divisor": 100.0},
    "trainer.correction_level": {"trainer.old_logp": "proximal"},
    "trainer.correction_low": {"trainer.old_logp": "proximal"},
    "trainer.correction_high": {"trainer.old_logp": "proximal"},
    "trainer.kl_in_reward": {"trainer.advantage": "rloo"},
    "trainer.kl_target": {"trainer.advantage": "rloo"},
    "trainer.kl_horizon": {"trainer.advantage": "rloo"},
    "trainer.reject": {"trainer.reject_high": 5.0},
    "trainer.reject_low": {"trainer.reject_high": 5.0},
    "trainer.reject_high": {"trainer.reject_low": 0.1},
    "trainer.reject_level": {"trainer.reject_high": 5.0},
    "trainer.reject_reduce": {"trainer.reject_high": 5.0},
}


MOST = 300
"""Combinations of values that are tried of one field."""


def field_of(name: str) -> Any:
    section, _, key = name.partition(".")
    return sections()[section].model_fields[key]


def enum_of(name: str) -> tuple[Any, ...]:
    """The values of a field that has few of them; empty where it has many."""
    found: list[Any] = []
    pending = [field_of(name).annotation, *field_of(name).metadata]
    while pending:
        kind = pending.pop()
        if isinstance(kind, OwnOr):
            found += [*kind.names, "own.module:part"]
        if get_origin(kind) is Annotated:
            pending += kind.__metadata__
        if kind is bool:
            found += [False, True]
        elif get_origin(kind) is Literal:
            found += get_args(kind)
        elif get_origin(kind) is not None:
            pending += [part for part in get_args(kind) if get_origin(kind) is not dict]
        elif kind is type(None):
            found.append(None)
    return tuple(found)


def other(name: str, config: RunConfig) -> Any:
    """A value that the field does not have where nobody gives it."""
    default = default_of(config, name)
    if name in OTHER and OTHER[name] != default:
        return OTHER[name]
    choices = [value for value in enum_of(name) if value != default and value is not None]
    if choices:
        return choices[0]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1 if name != "vllm.gpu_memory_frac" and default != 0.6 else 0.5
    text = str(field_of(name).annotation)
    for kind, value in (("float", 2.5), ("int", 3), ("Path", "there"), ("list", ["x"]), ("str", "other")):
        if kind in text:
            return value
    return "1 GiB" if name.endswith("memory") else f"{default}1"


def configured(values: dict[str, Any]) -> RunConfig:
    nested: dict[str, dict[str, Any]] = {}
    if values.get("distil.teacher") is not None:  # else it is refused
        values = {"trainer.algorithm": "opd"} | values
    for name, value in values.items():
        section, _, key = name.partition(".")
        nested.setdefault(section, {})[key] = value
    return config_from_dict(nested)


def test_every_field_has_an_entry_and_nothing_else_has_one() -> None:
    assert set(READ) == set(field_references()), (
        "libra/config/effects.py: READ says of each field who reads it, and when"
    )


def test_needs_look_at_fields_that_exist() -> None:
    for name, reading in READ.items():
        assert reading, name
        for need in itertools.chain(*reading.values()):
            assert set(need.fields) <= set(READ), name
            assert need.text, name


def cases() -> Iterator[tuple[str, str, Need, str]]:
    """(field, command, need, the field that the need looks at)."""
    for name, reading in READ.items():
        for command, needs in reading.items():
            for need in needs:
                for looked_at in need.fields:
                    yield name, command, need, looked_at


def values_to_walk(looked_at: str) -> tuple[Any, ...]:
    extra: dict[str, tuple[Any, ...]] = {
        "cluster.train_workers": (1, 2),
        "cluster.hybrid_workers": (0, 1),
        "cluster.scheduler": (None, "tcp://h:1"),
        "policy.boundaries_tokens": {"tp1": 3000.0},
        "cluster.engines": ((), ({"tp": 1, "count": 2, "slots": 4},)),
        "planner.trace": (None, "turns.csv"),
        "simulation.traces": (None, "turns.csv"),
        "simulation.calibration": (None, "mine.json"),
        "simulation.gpu": (None, "A100-80G"),
        "simulation.model": (None, "Qwen3-14B"),
        "simulation.layout": (None, {"tp1": 2}),
        "simulation.policy": (None, "fifo", "cmlfq", "mlfq", "predictor"),
        "simulation.objective": (None, "stream"),
        "planner.calibration": (None, "mine.json"),
        "evaluation.prompts": (0, 4),
        "run.eta": (0, 1),
        "rollout.max_new_tokens": (2, 64),
        "rollout.max_context_tokens": (64, 1024),
        "trainer.kl_coef": (0.0, 0.1),
        "trainer.lr": (0.0, 1e-3),
        "trainer.lora_rank": (None, 4),
        "trainer.epochs": (1, 2),
        "trainer.minibatches": (1, 2),
        "trainer.m2po_threshold": (None, 0.04),
        "trainer.kl_target": (None, 0.1),
        "trainer.mismatch_alarm": (None, 0.1),
        "watchdog.timeout_s": (None, 9.0),
        "distil.teacher": (None, "a/teacher"),
        "agent.function": (None, "mine.agents:agent"),
        "agent.command": (None, "python agent.py"),
        "services.named": ({}, {"judge": {"model": "a/judge"}}),
        "environment.tools": ({}, {"mcp": "python my_server.py"}),
        "environment.retries": (0, 5),
    }
    return extra.get(looked_at) or enum_of(looked_at)


@pytest.mark.parametrize("name", sorted({name for name, *_ in cases()}))
def test_each_field_is_told_exactly_where_what_it_needs_is_not_there(name: str) -> None:
    """Over values of everything it depends on: an error, a warning, or silence, as the table has it."""
    told = silent = 0
    refused: list[str] = []
    for command, needs in READ[name].items():
        looked_at = sorted({field for need in needs for field in need.fields} - {name})
        walked = list(itertools.product(*(values_to_walk(field) for field in looked_at)))
        for values in walked if len(walked) <= MOST else Random(0).sample(walked, MOST):
            around = dict(zip(looked_at, values, strict=True))
            try:
                base = configured(around | WITH.get(name, {}))
            except ConfigError:
                continue
            asked = around | {name: other(name, base)} | WITH.get(name, {})
            try:
                config = configured(asked)
            except ConfigError as error:
                refused.append(str(error))
                continue
            situation = Situation(command, frozenset({name}))
            lacking = [need for need in needs if not need.met(config, situation)]
            found = [each for each in ignored_settings(config, situation) if each.field == name]
            assert bool(found) == bool(lacking), (asked, found)
            if found:
                told += 1
                assert name in found[0].message
                assert all(need.text in found[0].message for need in lacking)
            else:
                silent += 1
    depends_on = {field for needs in READ[name].values() for need in needs for field in need.fields}
    assert all(any(field in text for field in {name, *depends_on}) for text in refused), refused
    told += len(refused)
    assert silent, f"{name} is never effective"
    assert told or all(not need.fields for needs in READ[name].values() for need in needs), f"{name} is never told"


@pytest.mark.parametrize("name", ["dashboard_names", "dashboard_port", "tool_slots"])
def test_what_a_cluster_of_your_own_does_not_read_is_told_though_slurm_would(name: str) -> None:
    value = {"dashboard_names": ["gateway.example"], "dashboard_port": 9000, "tool_slots": 9}[name]
    values: dict[str, Any] = {"cluster": {name: value, "scheduler": "tls://host:8786"}}
    situation = Situation("run")
    (line,) = warning_lines(ignored_settings(config_from_dict(values), situation))
    assert f"cluster.{name}=" in line and "needed is a local cluster" in line
    assert not ignored_settings(config_from_dict(values), Situation("slurm"))
    values["slurm"] = {"account": "lab"}  # `libra cluster slurm` has started that cluster from the same file
    assert not ignored_settings(config_from_dict(values), situation)


def test_a_default_a_preset_and_a_value_that_is_the_default_are_not_told() -> None:
    assert not ignored_settings(config_from_dict({}, ["trainer.algorithm=sapo"]))
    assert not ignored_settings(config_from_dict({}, ["trainer.algorithm=sapo", "trainer.clip_high=0.2"]))
    (found,) = ignored_settings(config_from_dict({}, ["trainer.algorithm=sapo", "trainer.clip_high=0.3"]))
    assert "trainer.clip_high=0.3" in found.message and "sapo" in found.message


def test_what_extends_and_overrides_say_is_given(tmp_path: Path) -> None:
    (tmp_path / "below.yaml").write_text("policy: {name: fifo, patience: 9}\n")
    (tmp_path / "mine.yaml").write_text("extends: below.yaml\ntrainer: {tau_negative: 2}\n")
    found = ignored_settings(load_config(tmp_path / "mine.yaml", ["vllm.eager=true"]))
    assert [each.field for each in found] == ["vllm.eager", "trainer.tau_negative", "policy.patience"]
    assert not ignored_settings(load_config(tmp_path / "mine.yaml", ["policy.name=mlfq", "trainer.tau_negative=1.05"]))


def test_a_resolved_configuration_tells_what_the_one_it_came_from_told(tmp_path: Path) -> None:
    from libra.config import dump_config

    config = config_from_dict({}, ["trainer.algorithm=gspo", "trainer.tau_positive=3"])
    (tmp_path / "config.resolved.yaml").write_text(dump_config(config))
    again = load_config(tmp_path / "config.resolved.yaml")
    assert again == config
    assert ignored_settings(again) == ignored_settings(config) != ()


def test_a_file_serves_several_commands_and_what_is_typed_one(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("planner: {num_gpus: 4}\nsimulation: {turns: 5}\nslurm_rollout: {jobs: 3}\n")
    config = load_config(tmp_path / "mine.yaml")
    assert not ignored_settings(config, Situation("run"))
    typed = frozenset({"planner.num_gpus", "simulation.turns", "slurm_rollout.jobs"})
    told = {each.field: each.message for each in ignored_settings(config, Situation("run", typed))}
    assert set(told) == typed
    assert "planner.layout=auto" in told["planner.num_gpus"]
    assert "libra cluster slurm" in told["slurm_rollout.jobs"]
    assert not ignored_settings(config, Situation("plan", frozenset({"planner.num_gpus"})))


def test_machine_client_and_options_count() -> None:
    offload = configured({"trainer.layout": "fsdp2", "cluster.train_workers": 2, "trainer.offload": True})
    assert not ignored_settings(offload)
    assert [each.field for each in ignored_settings(offload, Situation("run", has_gpu=lambda: False))] == [
        "trainer.offload"
    ]
    workers = configured({"cluster.rollout_workers": 2})
    assert not ignored_settings(workers, Situation("run"))
    typed = frozenset({"cluster.rollout_workers"})
    assert [each.field for each in ignored_settings(workers, Situation("run", typed, client=True))] == [*typed]
    turns = configured({"simulation.turns": 5})
    workload = frozenset({"--workload"})
    assert ignored_settings(turns, Situation("simulate", frozenset({"simulation.turns"}), workload))
    assert not ignored_settings(turns, Situation("simulate", options=workload))  # an option goes over a file


def test_shipped_files_have_no_setting_that_does_nothing(repository: Path) -> None:
    for path in sorted((repository / "configs").glob("*.yaml")):
        config = load_config(path)
        for command in ("run", "plan", "simulate", "slurm", None):
            assert not ignored_settings(config, Situation(command)), path


def test_each_command_says_it_in_one_line_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["config", "libra/quickstart", "trainer.tau_positive=2"])
    assert ended.value.code == 0
    printed = capsys.readouterr()
    assert "trainer.tau_positive=2.0" in printed.err and printed.err.count("\n") == 1
    assert "tau_positive: 2.0" in printed.out


@pytest.mark.parametrize(
    ("given", "ignored"),
    [
        ("trainer.late_tau=5.0", {"trainer.late_tau"}),
        ("trainer.late=wait & trainer.late_versions=3", {"trainer.late_versions"}),
        ("trainer.late=correct & trainer.late_wait_s=3.0", {"trainer.late_wait_s"}),
        ("trainer.late=correct & trainer.late_tau=5.0 & trainer.late_versions=3", set()),
        ("trainer.late=wait & trainer.late_wait_s=3.0", set()),
        ("trainer.algorithm=opd & distil.teacher=t & distil.estimator=sampled & distil.top_k=8", {"distil.top_k"}),
        ("trainer.algorithm=opd & distil.teacher=t & distil.samples=8", {"distil.samples"}),
        ("trainer.algorithm=opd & distil.teacher=t & distil.late=drop & distil.wait_s=3.0", {"distil.wait_s"}),
        ("distil.samples=8", {"distil.samples"}),
        ("staleness.over_age=drop", {"staleness.over_age"}),
        ("run.eta=1 & staleness.over_age=drop", set()),
    ],
)
def test_late_rewards_teachers_and_staleness_by_hand(given: str, ignored: set[str]) -> None:
    config = config_from_dict({}, given.split(" & "))
    assert {each.field for each in ignored_settings(config, Situation("run"))} == ignored
