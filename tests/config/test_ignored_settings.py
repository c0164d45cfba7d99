"""Settings without effect are reported: every field is in the table, and a report is there exactly where a need is not met."""

import itertools

import pytest

from libra.cli.main import main
from libra.config import config_from_dict, load_config
from libra.config.effects import READ, Situation, ignored_settings, warning_lines
from libra.config.field_help import field_references

# Another value for each field than its default, where one cannot be made from its type.
# What makes fields legal together; the cross-field checks refuse some values alone.


def configured(values):
    nested = {}
    if values.get("distil.teacher") is not None:  # else it is refused
        values = {"trainer.algorithm": "opd"} | values
    for name, value in values.items():
        section, _, key = name.partition(".")
        nested.setdefault(section, {})[key] = value
    return config_from_dict(nested)


def test_every_field_has_an_entry_and_nothing_else_has_one():
    assert set(READ) == set(field_references()), "effects.py: READ says of each field who reads it, and when"


def test_needs_look_at_fields_that_exist():
    for name, reading in READ.items():
        assert reading, name
        for need in itertools.chain(*reading.values()):
            assert set(need.fields) <= set(READ), name
            assert need.text, name


@pytest.mark.parametrize("name", ["dashboard_names", "dashboard_port", "tool_slots"])
def test_what_a_cluster_of_your_own_does_not_read_is_told_though_slurm_would(name):
    value = {"dashboard_names": ["gateway.example"], "dashboard_port": 9000, "tool_slots": 9}[name]
    values = {"cluster": {name: value, "scheduler": "tls://host:8786"}}
    situation = Situation("run")
    (line,) = warning_lines(ignored_settings(config_from_dict(values), situation))
    assert f"cluster.{name}=" in line and "needed is a local cluster" in line
    assert not ignored_settings(config_from_dict(values), Situation("slurm"))
    values["slurm"] = {"host": "login1"}  # `libra cluster slurm` has started that cluster from the same file
    assert not ignored_settings(config_from_dict(values), situation)


def test_a_default_a_preset_and_a_value_that_is_the_default_are_not_told():
    assert not ignored_settings(config_from_dict({}, ["trainer.algorithm=sapo"]))
    assert not ignored_settings(config_from_dict({}, ["trainer.algorithm=sapo", "trainer.correction_args.high=2.0"]))
    (found,) = ignored_settings(config_from_dict({}, ["trainer.algorithm=sapo", "trainer.correction_args.high=3"]))
    assert "trainer.correction_args=" in found.message and "none" in found.message


def test_what_extends_and_overrides_say_is_given(tmp_path):
    (tmp_path / "below.yaml").write_text("policy: {name: fifo, patience: 9}\n")
    (tmp_path / "mine.yaml").write_text("extends: below.yaml\ntrainer: {reject_args: {high: 2}}\n")
    found = ignored_settings(load_config(tmp_path / "mine.yaml", ["rollout.engine_args={enforce_eager: true}"]))
    assert [each.field for each in found] == ["rollout.engine_args", "trainer.reject_args", "policy.patience"]
    config = load_config(tmp_path / "mine.yaml", ["policy.name=mlfq", "trainer.reject_args.high=null"])
    assert not ignored_settings(config)


def test_a_resolved_configuration_tells_what_the_one_it_came_from_told(tmp_path):
    from libra.config import dump_config

    config = config_from_dict({}, ["trainer.algorithm=gspo", "trainer.lora_args.alpha=3"])
    (tmp_path / "config.resolved.yaml").write_text(dump_config(config))
    again = load_config(tmp_path / "config.resolved.yaml")
    assert again == config
    assert ignored_settings(again) == ignored_settings(config) != ()


def test_a_file_serves_several_commands_and_what_is_typed_one(tmp_path):
    (tmp_path / "mine.yaml").write_text("planner: {num_gpus: 4}\nsimulation: {iterations: 5}\nslurm: {host: login1}\n")
    config = load_config(tmp_path / "mine.yaml")
    assert not ignored_settings(config, Situation("run"))
    typed = frozenset({"planner.num_gpus", "simulation.iterations", "slurm.host"})
    told = {each.field: each.message for each in ignored_settings(config, Situation("run", typed))}
    assert set(told) == typed
    assert "planner.layout=auto" in told["planner.num_gpus"]
    assert "libra cluster slurm" in told["slurm.host"]
    assert not ignored_settings(config, Situation("plan", frozenset({"planner.num_gpus"})))


def test_machine_client_and_options_count():
    workers = configured({"cluster.rollout_workers": 2})
    assert not ignored_settings(workers, Situation("run"))
    typed = frozenset({"cluster.rollout_workers"})
    assert [each.field for each in ignored_settings(workers, Situation("run", typed, client=True))] == [*typed]
    turns = configured({"simulation.iterations": 5})
    workload = frozenset({"--workload"})
    assert ignored_settings(turns, Situation("simulate", frozenset({"simulation.iterations"}), workload))
    assert not ignored_settings(turns, Situation("simulate", options=workload))  # an option goes over a file


def test_shipped_files_have_no_setting_that_does_nothing(repository):
    for path in sorted([*(repository / "configs").glob("*.yaml"), *(repository / "examples").glob("*.yaml")]):
        config = load_config(path)
        for command in ("run", "plan", "simulate", "slurm", None):
            assert not ignored_settings(config, Situation(command)), path


def test_each_command_says_it_in_one_line_and_goes_on(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["config", "libra/quickstart", "trainer.lora_args.alpha=2"])
    assert ended.value.code == 0
    printed = capsys.readouterr()
    assert "trainer.lora_args=" in printed.err and printed.err.count("\n") == 1
    assert "alpha: 2.0" in printed.out


@pytest.mark.parametrize(("given", "ignored"), [
    ("trainer.late_args.versions=5", {"trainer.late_args"}),
    ("trainer.late=drop & trainer.late_args.versions=3", {"trainer.late_args"}),
    ("trainer.late=correct & trainer.late_args.versions=3", set()),
    ("trainer.late=wait & trainer.late_args.wait_s=3.0", set()),
    ("trainer.algorithm=opd & distil.teacher=t & distil.tokens=8", set()),
    ("trainer.reject_args.low=0.5", {"trainer.reject_args"}), ("trainer.reject_args.m2po=0.5", set()),
    ("trainer.kl_args.estimator=k1", {"trainer.kl_args"}),
    ("trainer.algorithm=opd & distil.teacher=t & distil.wait_s=3.0", set()), ("distil.tokens=8", {"distil.tokens"}),
    ("staleness.over_age=drop", {"staleness.over_age"}), ("run.eta=1 & staleness.over_age=drop", set()),
])  # fmt: skip
def test_late_rewards_teachers_and_staleness_by_hand(given, ignored):
    config = config_from_dict({}, given.split(" & "))
    assert {each.field for each in ignored_settings(config, Situation("run"))} == ignored
