"""``libra plan`` says what to do, as words and as JSON, and refuses what cannot be."""

import json

import pytest
from click.testing import CliRunner
from deployments import configured_deployment

from libra.cli.main import cli, main
from libra.cli.plan_command import fixed_by
from libra.config import dump_config, load_config
from libra.config.effects import Situation, ignored_settings
from libra.config.streaming import turns
from libra.driver.launch_layout import with_way
from libra.driver.run_session import Session
from libra.errors import ConfigError, PlanError
from libra.planner.from_config import snapshot_of
from libra.planner.plan_settings import with_plan

GIVEN = ("model.path=Qwen/Qwen3-4B", "planner.num_gpus=16", "trainer.prompts=8", "trainer.group_size=4")


def _run(repository, *arguments):
    config = str(repository / "configs/qwen3_4b_gpu.yaml")
    result = CliRunner().invoke(cli, ["plan", config, *GIVEN, *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_json_has_the_whole_plan_and_words_do_too(repository):
    values = json.loads(_run(repository, "--json", "--what-if", "--why", "train=4", "--why", "tp=2"))
    assert values["num_gpus"] == 16
    assert values["training"]["gpus"] + values["rollout_gpus"] + values["spare_gpus"] == 16
    assert [why["choice"] for why in values["why"]] == ["train=4", "tp=2"]
    assert values["why"][0]["train_gpus"] == 4
    assert "bottleneck" in _run(repository, "--what-if")


@pytest.mark.live
def test_the_configured_number_of_training_workers_is_compared_with_the_planned_one(repository):
    planned = json.loads(_run(repository, "--json"))["training"]["gpus"]
    values = json.loads(_run(repository, "--json", f"cluster.train_workers={planned + 2}"))
    assert values["training"]["gpus"] == planned
    assert [why["choice"] for why in values["why"]] == [f"cluster.train_workers={planned + 2}"]
    assert values["why"][0]["train_gpus"] == planned + 2
    said = _run(repository, "cluster.train_workers=1", "trainer.layout=ddp")
    assert "cluster.train_workers=1 cannot be planned" in said


@pytest.mark.live
def test_only_what_can_be_run_is_planned_unless_asked(repository):
    values = json.loads(_run(repository, "--json"))
    assert {bucket["tp"] for bucket in values["buckets"]} == {1}
    assert values["training"]["gpus"] > 1  # as many as are best: the trainer runs on any number of workers
    (note,) = values["notes"]
    assert "TP 2, 4, 8" in note
    words = _run(repository, "trainer.prompts=64", "--why", "tp=2")
    assert note in words
    assert json.loads(_run(repository, "--json", "--what-if"))["notes"] == []


@pytest.mark.parametrize("wrong", ['fixed_engines={"2": 1}', "tp=[8]"])
def test_a_layout_that_cannot_be_run_is_refused_by_plan_and_run(repository, tmp_path, wrong):
    config = load_config(str(repository / "configs/qwen3_4b_gpu.yaml"), (*GIVEN, f"planner.{wrong}"))
    field = "planner." + wrong.partition("=")[0]
    with pytest.raises(PlanError, match=f"{field}.*--what-if"):
        snapshot_of(config, None, what_if=False)
    snapshot_of(config, None, what_if=True)
    tiny = (
        "model.path=libra/tiny-arithmetic", "planner.replan=advise", "planner.num_gpus=8", f"planner.{wrong}",
        f"run.dir={tmp_path}",
    )  # fmt: skip
    with pytest.raises(PlanError, match=field), Session(load_config(str(repository / "configs/quickstart.yaml"), tiny)):
        pass
    assert not any(tmp_path.iterdir())  # before anything was started


def test_the_trainer_is_planned_as_it_runs(repository):
    def training(*given):
        config = load_config(str(repository / "configs/qwen3_4b_gpu.yaml"), (*GIVEN, *given))
        return snapshot_of(config, None, what_if=False)[0].training

    plain = training()
    assert (plain.kind, plain.gradient_checkpointing, plain.logit_chunk_tokens) == ("fsdp2", True, 1024)
    assert (plain.weight_bytes, plain.master_bytes, plain.max_row_tokens) == (2, 4, 8192)
    for given, name, value in (
        ("trainer.layout=ddp", "kind", "ddp"),
        ("trainer.gradient_checkpointing=false", "gradient_checkpointing", False),
        ("trainer.layout=fsdp2_offload", "offload", True),
        ("trainer.logit_chunk_tokens=77", "logit_chunk_tokens", 77),
        ("trainer.micro_batch_tokens=9000", "micro_batch_tokens", 9000),
        ("trainer.max_row_tokens=100", "max_row_tokens", 100),
        ("trainer.kl_coef=0.1", "reference", True),
        ("trainer.entropy_coef=0.1", "entropy_bonus", True),
        ("model.master_dtype=null", "master_bytes", None),
    ):
        assert getattr(training(given), name) == value
        assert getattr(plain, name) != value
    wide = training("model.dtype=float32")
    assert (wide.weight_bytes, wide.master_bytes) == (4, None)


def test_engines_are_fixed_by_degree_and_the_written_configuration_says_so(repository, tmp_path):
    given = (*GIVEN, 'planner.fixed_engines={"2": 3}')
    config = load_config(str(repository / "configs/qwen3_4b_gpu.yaml"), given)
    assert config.planner.fixed_engines == {2: 3}
    written = tmp_path / "config.resolved.yaml"
    written.write_text(dump_config(config))
    assert load_config(str(written)).planner.fixed_engines == {2: 3}
    assert snapshot_of(config, None, what_if=True)[0].fixed_engines == {2: 3}


def test_trajectories_end_where_the_run_ends_them(repository):
    def asked(*more):
        config = load_config(str(repository / "configs/qwen3_4b_gpu.yaml"), (*GIVEN, *more))
        snapshot, note = snapshot_of(config, None, what_if=True)
        return float(snapshot.workload.generated_tokens.max()), note

    assert asked()[0] > 2048
    longest, note = asked("planner.lengths.turns=1")
    assert longest == 2048
    assert "rollout.max_new_tokens=2048 in planner.lengths.turns=1" in note
    longest, note = asked("rollout.max_context_tokens=2560")
    assert longest == 2048
    assert "rollout.max_context_tokens=2560" in note
    with pytest.raises(PlanError, match="leave nothing to generate"):
        asked("planner.lengths.prompt_tokens=9000")


@pytest.mark.live
def test_shipped_configurations_have_a_plan(repository):
    for path in sorted([*(repository / "configs").glob("*.yaml"), *(repository / "examples").glob("*.yaml")]):
        made = ("math_tools", "code_tests", "games", "repair", "search")  # their models are downloaded or made first
        prepared = ("model.path=Qwen/Qwen3-0.6B",) if path.stem in made else ()
        result = CliRunner().invoke(cli, ["plan", str(path), *prepared], catch_exceptions=False)
        assert result.exit_code == 0, f"{path.name}: {result.output}"
        assert "bottleneck" in result.output


def test_a_trace_sets_the_lengths(repository, tmp_path):
    trace = tmp_path / "turns.csv"
    rows = [f"task{i},0,0,100,{200 + i},0.5" for i in range(40)]
    trace.write_text("\n".join(["task,sample,turn,prompt_tokens,completion_tokens,tool_s", *rows]))
    values = json.loads(_run(repository, "--json", "--trace", str(trace)))
    assert values["num_trajectories"] == 32
    assert values["bounds"]["longest_s"] < json.loads(_run(repository, "--json"))["bounds"]["longest_s"]


def test_a_choice_of_why_fixes_what_it_names(repository):
    config = load_config(str(repository / "configs/qwen3_4b_gpu.yaml"), GIVEN)
    snapshot, _ = snapshot_of(config, None, what_if=True)
    assert fixed_by(snapshot, "engines.2=3").fixed_engines == {2: 3}
    for wrong in ("train", "train=x", "dp=4", "engines=3"):
        with pytest.raises(ConfigError):
            fixed_by(snapshot, wrong)


def test_a_written_plan_is_a_configuration_that_starts_it(repository, tmp_path):
    file = tmp_path / "plans" / "plan.yaml"
    file.parent.mkdir()
    given = ("run.eta=1", "environment.name=libra.testing:FixedTurns", "trainer.algorithm=gspo")
    words = _run(repository, *given, "--write", str(file))
    assert f"written: {file}; type libra run {file}" in words
    made = load_config(str(file))
    assert "warning" not in words
    values = json.loads(_run(repository, given[0], "--json"))
    deployed = configured_deployment(made)
    assert deployed.train_gpus == values["training"]["gpus"]
    assert deployed.engines == {bucket["tp"]: bucket["engines"] for bucket in values["buckets"]}
    assert deployed.concurrency == {bucket["tp"]: bucket["concurrency"] for bucket in values["buckets"]}
    layout = made.planner.planned
    assert layout is not None
    assert (layout.gpu, layout.num_gpus, layout.step_s) == ("A800-80G", 16, values["step_s"])
    plain = load_config(str(repository / "configs/qwen3_4b_gpu.yaml"), (*GIVEN, *given))
    assert layout.way == "streaming" and "would save" in layout.way_why
    started = with_way(with_plan(plain, layout), layout.way)
    assert made == started and made.trainer.streaming == "on"  # overrides that were typed are in the file, too
    assert "extends: " in file.read_text()
    assert "null" not in file.read_text().partition("\ncluster:")[2]
    slots = load_config(str(file), ["rollout.slots=7"])  # as a file below may have: the plan lists its engines' slots
    assert not [each for each in ignored_settings(slots, Situation("run")) if each.field == "rollout.slots"]
    _run(repository, *given, "--write", str(file))  # a plan may be written anew
    (tmp_path / "mine.yaml").write_text("run: {eta: 1}\n")
    for place in ("mine.yaml", "missing/plan.yaml", ""):
        with pytest.raises(ConfigError, match=r"--write|mine\.yaml"):
            _run(repository, "--write", str(tmp_path / place))
    assert (tmp_path / "mine.yaml").read_text() == "run: {eta: 1}\n"


BUSY = (
    "run.eta=0", "planner.lengths.generated_p50_tokens=6000", "planner.lengths.generated_p99_tokens=8100",
    "rollout.max_context_tokens=16000",
    "rollout.max_new_tokens=8000", "trainer.prompts=24", "trainer.group_size=8", "trainer.micro_batch_tokens=16000",
)  # fmt: skip


@pytest.mark.live
def test_a_choice_that_turns_engines_is_written_with_the_workers_for_it(repository, tmp_path):
    few = (*BUSY, "planner.fixed_train_gpus=2")
    values = json.loads(_run(repository, *few, "--json"))["regime"]
    assert values["choice"] == "turning"
    assert values["step_s"]["turning"] < 0.8 * values["step_s"]["streaming"]
    assert values["settings"] == {
        "trainer.streaming": "on", "trainer.turning": "on", "cluster.hybrid_workers": "14",
    }  # fmt: skip
    _run(repository, *few, "--write", str(tmp_path / "plan.yaml"))
    made = load_config(str(tmp_path / "plan.yaml"))
    assert turns(made) and made.cluster.hybrid_workers == 14 and made.cluster.train_workers == 2
    assert made.planner.planned is not None and made.planner.planned.way == "turning"


@pytest.mark.live
def test_what_the_configuration_cannot_take_is_said_and_not_chosen(repository):
    few = (*BUSY, "planner.fixed_train_gpus=2")
    wide = json.loads(_run(repository, *few, "rollout.engine=vllm", "planner.tp=[2]", "--json"))["regime"]
    assert wide["choice"] != "turning" and "cluster.hybrid_workers" not in wide["settings"]
    assert wide["obstacles"]["turning"].startswith("an engine of 2 GPUs would train with one of them")
    whole = json.loads(_run(repository, *few, "trainer.epochs=2", "--json"))["regime"]
    assert (whole["choice"], whole["settings"]) == ("split", {}) and "epochs=1" in whole["obstacles"]["streaming"]
    assert set(whole["step_s"]) == {"split"}


def test_a_plan_of_another_model_or_for_other_hardware_is_not_run(repository, tmp_path, capsys):
    file = tmp_path / "plan.yaml"
    _run(repository, "--write", str(file))

    def refused(*more):
        with pytest.raises(SystemExit) as stopped:
            main(["run", str(file), f"run.dir={tmp_path / 'runs'}", *more])
        assert stopped.value.code == 2
        return capsys.readouterr().err

    assert "planner.planned: the plan is for 16 x A800-80G, this cluster has " in refused()
    other = refused("model.path=libra/tiny-arithmetic")
    assert "the plan is for Qwen3-4B" in other
    assert "model.path is tiny_arithmetic" in other
    assert "3, and planner.planned has 2; leave cluster.train_workers as planned" in refused("cluster.train_workers=3")
    assert not (tmp_path / "runs").exists()
