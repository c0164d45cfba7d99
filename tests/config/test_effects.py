"""Settings that change nothing are told: every field is in the table, and the table says what the code does."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import torch

from libra.cli.main import main
from libra.config import RunConfig, config_from_dict, load_config, resolve_model
from libra.config.effect_conditions import Need, Situation, value_of
from libra.config.effects import READ, default_of, ignored_settings, warning_lines
from libra.config.field_help import field_references, sections
from libra.errors import ConfigError

# Another value for each field than its default, where one cannot be made from its type.
OTHER: dict[str, Any] = {
    "run.name": "another",
    "model.path": "some/model",
    "model.master_dtype": None,
    "environment.name": "jsonl",
    "environment.args": {"path": "x"},
    "rollout.max_new_tokens": 32,
    "rollout.max_context_tokens": 512,
    "rollout.temperature": 0.5,
    "trainer.clip_low": 0.5,
    "trainer.correction_low": 0.5,
    "trainer.betas": (0.8, 0.9),
    "trainer.correction": "truncate",
    "policy.boundaries_tokens": {"tp1": 3000.0},
    "cluster.engines": ({"tp": 1, "count": 2},),
    "slurm.port": 99,
    "simulation.layout": {"tp4": 1},
    "planner.tp": [1],
    "planner.fixed_engines": {1: 2},
    "planner.generated_p99_tokens": 9999.0,
    "planner.generated_p50_tokens": 2000.0,
    "rollout.max_turns": 3,
    "trainer.max_row_tokens": 256,
}
# What makes fields legal together; the cross-field checks refuse some values alone.
WITH: dict[str, dict[str, Any]] = {
    "trainer.aggregation": {"trainer.loss_divisor": 100.0},
    "trainer.correction_level": {"trainer.old_logp": "proximal"},
    "trainer.correction_low": {"trainer.old_logp": "proximal"},
    "trainer.correction_high": {"trainer.old_logp": "proximal"},
}


def field_of(name: str) -> Any:
    section, _, key = name.partition(".")
    return sections()[section].model_fields[key]


def enum_of(name: str) -> tuple[Any, ...]:
    """The values of a field that has few of them; empty where it has many."""
    found: list[Any] = []
    pending = [field_of(name).annotation]
    while pending:
        kind = pending.pop()
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
        "evaluation.prompts": (0, 4),
        "trainer.kl_coef": (0.0, 0.1),
        "trainer.lr": (0.0, 1e-3),
        "trainer.mismatch_alarm": (None, 0.1),
        "watchdog.timeout_s": (None, 9.0),
    }
    return extra.get(looked_at) or enum_of(looked_at)


def test_the_walk_knows_values_of_everything_that_anything_depends_on() -> None:
    assert all(values_to_walk(looked_at) for *_, looked_at in cases())


@pytest.mark.parametrize("name", sorted({name for name, *_ in cases()}))
def test_each_field_is_told_exactly_where_what_it_needs_is_not_there(name: str) -> None:
    """Over every value of everything it depends on: an error, a warning, or silence, as the table has it."""
    told = silent = 0
    refused: list[str] = []
    for command, needs in READ[name].items():
        looked_at = sorted({field for need in needs for field in need.fields} - {name})
        for values in itertools.product(*(values_to_walk(field) for field in looked_at)):
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


def test_a_default_a_preset_and_a_value_that_is_the_default_are_not_told() -> None:
    assert not ignored_settings(config_from_dict({}, ["trainer.algorithm=sapo"]))
    assert not ignored_settings(config_from_dict({}, ["trainer.algorithm=sapo", "trainer.clip_high=0.2"]))
    (found,) = ignored_settings(config_from_dict({}, ["trainer.algorithm=sapo", "trainer.clip_high=0.3"]))
    assert found.message == (
        "trainer.clip_high=0.3 has no effect here; needed is a trainer.loss other than sapo and reinforce"
    )


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


def test_settings_with_one_reason_share_a_line() -> None:
    config = config_from_dict({}, ["trainer.loss=sapo", "trainer.clip_low=0.1", "trainer.clip_high=0.3"])
    assert warning_lines(ignored_settings(config)) == [
        "trainer.clip_low=0.1, trainer.clip_high=0.3 have no effect here; needed is a trainer.loss other than sapo and reinforce"
    ]


def test_libra_train_tells_it_too_and_refuses_two_environments(caplog: pytest.LogCaptureFixture) -> None:
    import libra

    typed = {"run__dir": "/proc/no/such", "planner__num_gpus": 3, "cluster__dashboard_port": 0}
    with pytest.raises(OSError):  # after it was told
        libra.train(prompts=["x"], reward=lambda completion: 0.0, **typed)
    assert "planner.num_gpus=3 has no effect here; needed is planner.layout=auto" in caplog.text
    with pytest.raises(ConfigError, match="environment__name"):
        libra.train(prompts=["x"], reward=lambda completion: 0.0, environment__name="jsonl")


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
    files = sorted((repository / "configs").glob("*.yaml"))
    assert files
    for path in files:
        for command in ("run", "plan", "simulate", "slurm", None):
            assert not ignored_settings(load_config(path), Situation(command)), path


@pytest.fixture(scope="module")
def tiny_model() -> Path:
    return Path(resolve_model("libra/tiny-arithmetic"))


def test_each_command_says_it_in_one_line_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["config", "libra/quickstart", "trainer.tau_positive=2"])
    assert ended.value.code == 0
    printed = capsys.readouterr()
    assert printed.err == "libra: warning: trainer.tau_positive=2.0 has no effect here; needed is trainer.loss=sapo\n"
    assert "tau_positive: 2.0" in printed.out
    with pytest.raises(SystemExit):
        main(["plan", "libra/quickstart", "policy.name=fifo"])
    assert "policy.name=fifo has no effect in libra plan; only in libra run" in capsys.readouterr().err


# ---------------------------------------------------------------- the claims against the code


def read_by(build: Callable[[Any], object], config: RunConfig) -> set[str]:
    """Dotted names of ``config`` that ``build`` reads, each through a section that takes note of it."""
    seen: set[str] = set()

    def recorded(section_name: str, section: Any) -> Any:
        class Recorded(type(section)):  # type: ignore[misc]
            def __getattribute__(self, key: str) -> Any:
                if key in type(section).model_fields:
                    seen.add(f"{section_name}.{key}")
                return super().__getattribute__(key)

        return Recorded.model_construct(**{key: getattr(section, key) for key in type(section).model_fields})

    parts = {name: recorded(name, getattr(config, name)) for name in sections()}
    seen.clear()
    build(RunConfig.model_construct(**parts))
    return seen


def effective(config: RunConfig, command: Any, prefix: str = "") -> set[str]:
    """Names that the table says ``command`` reads, where the configuration is as it is."""
    situation = Situation(command)
    return {
        name
        for name, reading in READ.items()
        if name.startswith(prefix) and command in reading and all(n.met(config, situation) for n in reading[command])
    }


def test_libra_plan_reads_what_the_table_says(tmp_path: Path) -> None:
    from libra.cli.plan import print_plan

    def plan(config: Any) -> None:
        print_plan(config, "libra/quickstart", trace=None, why=(), what_if=True, write=None, as_json=True)

    trace = tmp_path / "turns.csv"
    trace.write_text("task,sample,turn,prompt_tokens,completion_tokens,tool_s\na,0,0,10,20,\na,1,0,10,30,0.5\n")
    base = load_config("libra/quickstart", ["model.path=Qwen3-0.6B", "trainer.prompts=2", "trainer.group_size=2"])
    for changes in ({}, {"trace": trace}):
        config = base.model_copy(update={"planner": base.planner.model_copy(update=changes)})
        # The planner reads the degree of engines off planner.tp alone when it may plan what does not run.
        assert read_by(plan, config) | {"rollout.engine"} == effective(config, "plan") | {"rollout.engine"}


def test_a_run_that_replans_reads_of_the_planner_what_the_table_says() -> None:
    from types import SimpleNamespace

    from libra.driver.planning import Planning, run_of

    def replan(config: Any) -> None:
        spec: Any = SimpleNamespace(config=config, model_dir=resolve_model("libra/tiny-arithmetic"))
        spec.make_environment = lambda: None
        Planning(spec, calls=None, write=None, tell=None)  # type: ignore[arg-type]
        run = run_of(spec)
        run.may_have("vllm", 2)
        run.ratio(1, 2, 4.0, 100.0)

    config = config_from_dict({"planner": {"replan": True}})
    read = {name for name in read_by(replan, config) if name.startswith("planner.")}
    # Whether a run replans its driver asks, and what it starts is asked before it begins.
    assert read | {"planner.replan", "planner.layout", "planner.planned"} == effective(config, "run", "planner.")


@pytest.mark.parametrize("policy", get_args(field_of("simulation.policy").annotation))
@pytest.mark.parametrize("drawn_from_traces", [False, True])
def test_libra_simulate_reads_what_the_table_says(policy: str, drawn_from_traces: bool, tmp_path: Path) -> None:
    from libra.cli.simulate import simulate_run

    def simulate(config: Any) -> None:
        simulate_run(config, from_run=None, workload=None, save_workload=None, as_json=False)

    trace = tmp_path / "turns.csv"
    header = (
        "source,model,task,sample,turn,tool,status,payload_chars,prompt_tokens,completion_tokens,llm_s,tool_s,gap_s"
    )
    rows = [
        f"s,m,t{task},{sample},{turn},bash,ok,40,{100 + 20 * turn},20,1,0.1,0"
        for task, sample, turn in itertools.product(range(4), range(2), range(3))
    ]
    trace.write_text("\n".join([header, *rows]) + "\n")
    config = config_from_dict(
        {
            "trainer": {"prompts": 2, "group_size": 2},
            "simulation": {"policy": policy, "turns": 2, "layout": {"tp2": 1}}
            | ({"traces": str(trace)} if drawn_from_traces else {}),
        }
    )
    assert read_by(simulate, config) == effective(config, "simulate")


def test_slurm_scripts_read_what_the_table_says(tmp_path: Path) -> None:
    from libra.cluster.slurm.jobs import scripts

    pytest.importorskip("dask_jobqueue")
    config = config_from_dict({})
    read = read_by(lambda config: scripts(config, tmp_path), config)
    # What is read beside the scripts: where they lie, how often the queue is looked at, and the scheduler's own page.
    beside = {"slurm.dir", "slurm.reconcile_s", "cluster.dashboard_port"}
    assert read | beside == effective(config, "slurm")
    source = Path("libra/cluster/slurm/service.py").read_text() + Path("libra/cli/slurm.py").read_text()
    assert all(re.search(rf"\b{name.replace('.', chr(92) + '.')}\b", source) for name in beside)


def test_a_local_cluster_reads_what_the_table_says() -> None:
    from libra.cluster.local import worker_resources

    some = [{"tp": 1, "count": 1, "slots": 4}, {"tp": 1, "count": 1}]
    for cluster in ({}, {"engines": some}, {"engines": some[:1]}, {"rollout_workers": 2}, {"hybrid_workers": 1}):
        config = config_from_dict({"cluster": cluster})
        read = read_by(worker_resources, config) & {"rollout.slots"}
        assert read == effective(config, "run") & {"rollout.slots"}, cluster
    alike = config_from_dict({})
    assert {"cluster.tool_slots", "cluster.tool_workers", "cluster.rollout_workers", "cluster.engines"} <= read_by(
        worker_resources, alike
    )


@pytest.mark.parametrize("engine", get_args(field_of("rollout.engine").annotation))
def test_an_engine_is_made_of_what_the_table_says(engine: str, tiny_model: Path) -> None:
    from libra.worker.engine_factory import EngineKind, make_engine

    config = config_from_dict({"rollout": {"engine": engine}})
    looked_at = {"rollout.exact_logprobs", "rollout.keep_kv", *(name for name in READ if name.startswith("vllm."))}
    read = read_by(lambda config: make_engine(config, EngineKind(engine, 2), tiny_model), config)
    assert read & looked_at == effective(config, "run") & looked_at


@pytest.mark.parametrize("name", get_args(field_of("policy.name").annotation))
def test_an_ordering_has_the_dials_that_the_table_says(name: str) -> None:
    from libra.policy import make_ordering

    config = config_from_dict({"policy": {"name": name}})
    read = effective(config, "run")
    same = make_ordering(name).snapshot()
    assert (make_ordering(name, objective="stream").snapshot() != same) == ("policy.objective" in read)
    assert (make_ordering(name, patience=3).snapshot() != same) == ("policy.patience" in read)


def losses_of(config: RunConfig, batch: Any, logp_N: torch.Tensor, reference_N: torch.Tensor) -> bytes:
    """What a step minimises under ``config``, token by token and summed, as bytes."""
    from libra.train.objective import Objective
    from libra.train.replica_settings import TrainSettings
    from libra.worker.replica_factory import NOT_THE_REPLICAS

    settings = TrainSettings(**config.trainer.model_dump(exclude=set(NOT_THE_REPLICAS)))
    objective = Objective(settings)
    with_reference = settings.kl_coef > 0
    loss_N, _ = objective.token_losses(
        batch, logp_N, entropy_N=-logp_N, reference_logp_N=reference_N if with_reference else None
    )
    total = objective.aggregation.weighted_sum(loss_N, batch.sequences)
    weight = objective.aggregation.weight_sum(num_tokens=len(loss_N), num_sequences=len(batch.samples))
    return torch.cat([loss_N, total[None] / objective.aggregation.divisor_of(weight)]).numpy().tobytes()


@pytest.fixture(scope="module")
def scored() -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A micro-batch whose ratios are on both sides of every bound, stale tokens among them."""
    from libra.train.sequence_packing import Sample, pack

    rng = np.random.default_rng(0)

    def around(mean: float) -> np.ndarray[Any, Any]:
        return rng.normal(mean, 1, 40).astype(np.float32)

    samples = [
        Sample(
            np.arange(41),
            np.arange(40),
            np.arange(1, 41),
            around(-2 - ratio),
            rng.random(40) < 0.5,
            advantage,
            proximal_logp=around(-2 - ratio),
        )
        for advantage, ratio in itertools.product((-2.0, 1.0), (-0.6, 0.6))
    ]
    (batch,) = pack(samples, max_row_tokens=1024, micro_batch_tokens=1024)
    logp_N = torch.from_numpy(rng.normal(-2, 1.5, 160).astype(np.float32))
    return batch, logp_N, torch.from_numpy(rng.normal(-2, 3.0, 160).astype(np.float32))


# Two values each that are far apart.
LOSS_FIELDS: dict[str, tuple[Any, ...]] = {
    "trainer.clip_low": (0.05, 0.9),
    "trainer.clip_high": (0.05, 1.5),
    "trainer.dual_clip": (1.1, 2.0),
    "trainer.tau_positive": (0.5, 3.0),
    "trainer.tau_negative": (0.5, 3.0),
    "trainer.log_ratio_coef": (0.1, 1.0),
    "trainer.loss_divisor": (10.0, 1000.0),
    "trainer.old_logp": ("behaviour", "proximal"),
    "trainer.correction_level": ("token", "sequence"),
    "trainer.correction_low": (0.4, 0.9),
    "trainer.correction_high": (1.1, 2.0),
    "trainer.kl_estimator": ("k1", "k2"),
    "trainer.kl_bound": (0.01, 3.0),
}


@pytest.mark.parametrize("name", LOSS_FIELDS)
def test_the_loss_depends_on_a_field_exactly_where_the_table_says(name: str, scored: Any) -> None:
    """Over every loss, aggregation, ratio, correction and KL term: two values of the field give the same bytes, or others."""
    key = name.partition(".")[2]
    seen = set()
    walked = itertools.product(
        enum_of("trainer.loss"),
        ("token-mean", "seq-mean-token-sum-norm", "constant"),
        ("behaviour", "proximal"),
        enum_of("trainer.correction"),
        (0.0, 0.1),
    )
    for loss, aggregation, old_logp, correction, kl_coef in walked:
        around = {"loss": loss, "aggregation": aggregation, "old_logp": old_logp, "correction": correction}
        around |= {"kl_coef": kl_coef, "loss_divisor": 50.0}
        base = config_from_dict({})
        trainer = base.trainer.model_copy(update=around)
        if correction != "none" and (old_logp == "behaviour" or name == "trainer.old_logp"):
            continue  # refused by the cross-field checks
        configs = [
            base.model_copy(update={"trainer": trainer.model_copy(update={key: value})}) for value in LOSS_FIELDS[name]
        ]
        claimed = name in effective(configs[0], "run")
        one, two = (losses_of(config, *scored) for config in configs)
        assert (one != two) == claimed, around
        seen.add(claimed)
    assert seen == ({True, False})


@pytest.mark.parametrize("estimator", enum_of("trainer.advantage"))
@pytest.mark.parametrize("normalize", [False, True])
def test_advantages_depend_on_a_field_exactly_where_the_table_says(estimator: Any, normalize: bool) -> None:
    from libra.train import GroupRewards, batch_advantages

    def advantages(**options: Any) -> bytes:
        groups = [
            GroupRewards(
                np.array(rewards), np.ones(4, np.bool_), np.array([3, 5, 7, 9]), np.array([True, True, False, True])
            )
            for rewards in ([0.0, 1.0, 0.5, 1.0], [2.0, 0.0, 0.0, 1.0])
        ]
        found, _ = batch_advantages(groups, estimator, **{"normalize_std": normalize} | options)
        return np.concatenate(found).tobytes()

    read = effective(config_from_dict({"trainer": {"advantage": estimator, "normalize_std": normalize}}), "run")
    assert (advantages(eps=1e-6) != advantages(eps=1.0)) == ("trainer.std_eps" in read)
    assert (advantages() != advantages(normalize_std=not normalize)) == ("trainer.normalize_std" in read)


def test_master_weights_exist_exactly_where_the_table_says(tiny_model: Path) -> None:
    from libra.train import Replica, TrainSettings

    for dtype in enum_of("model.dtype"):
        has = Replica(tiny_model, TrainSettings(), dtype=dtype, master_dtype="float32").master is not None
        assert has == ("model.master_dtype" in effective(config_from_dict({"model": {"dtype": dtype}}), "run"))


def test_what_a_run_reads_stands_in_its_code(repository: Path) -> None:
    """A weak claim for the fields that only a running system reads: the name is an attribute somewhere outside of the settings."""
    sources = [path for path in (repository / "libra").rglob("*.py") if "config" not in path.parts]
    text = "\n".join(path.read_text() for path in sources)
    dumped = {"policy", "trainer"}  # handed over whole, by name
    for name in READ:
        section, _, key = name.partition(".")
        assert re.search(rf"\.{key}\b", text) or (section in dumped and re.search(rf"\b{key}\b", text)), name


def test_the_walk_would_notice_a_wrong_claim() -> None:
    config = configured({"trainer.loss": "sapo", "trainer.clip_low": 0.9})
    assert value_of(config, "trainer.clip_low") == 0.9
    assert [each.field for each in ignored_settings(config)] == ["trainer.clip_low"]
