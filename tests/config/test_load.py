"""Reading configurations: layers, overrides, and messages for every kind of mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.config import RunConfig, config_from_dict, dump_config, load_config, typed_settings
from libra.config.field_help import field_references
from libra.errors import ConfigError


def problem(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config_from_dict({}, overrides)
    return str(caught.value)


def file_problem(directory: Path, text: str, *overrides: str) -> str:
    path = directory / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_every_shipped_file_loads(repository: Path) -> None:
    paths = sorted((repository / "configs").glob("*.yaml"))
    assert {"quickstart.yaml", "base.yaml"} <= {path.name for path in paths}
    for path in paths:
        assert isinstance(load_config(path), RunConfig)


def test_a_shipped_file_is_found_by_its_name(repository: Path) -> None:
    assert load_config("libra/quickstart") == load_config(repository / "configs/quickstart.yaml")


def test_a_file_goes_over_what_it_extends_and_an_override_over_both(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text("run: {iterations: 3, eta: 2}\ntrainer: {lr: 0.5, prompts: 4}\n")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper/second.yaml").write_text("extends: ../first.yaml\nrun: {eta: 1}\ntrainer: {lr: 1e-3}\n")
    config = load_config(tmp_path / "deeper/second.yaml", ["trainer.lr=1e-5"])
    assert (config.run.iterations, config.run.eta, config.trainer.lr, config.trainer.prompts) == (3, 1, 1e-5, 4)


def test_a_file_may_extend_one_that_ships(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: libra/quickstart\nrun: {seed: 9}\n")
    assert load_config(tmp_path / "mine.yaml") == load_config("libra/quickstart", ["run.seed=9"])


def test_files_that_extend_each_other_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(ConfigError, match=r"circle: .*a\.yaml -> .*b\.yaml -> .*a\.yaml"):
        load_config(tmp_path / "a.yaml")


def test_a_missing_extended_file_names_who_asked_for_it(tmp_path: Path) -> None:
    message = file_problem(tmp_path, "extends: gone.yaml\n")
    assert "gone.yaml" in message
    assert f"extended by {tmp_path / 'mine.yaml'}" in message


@pytest.mark.parametrize("name", ["nowhere.yaml", "libra/nothing"])
def test_a_missing_file_is_a_clear_error(name: str) -> None:
    with pytest.raises(ConfigError, match=r"no such configuration file; type .*libra/quickstart"):
        load_config(name)


def test_a_directory_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


def test_an_unknown_key_names_itself_its_place_and_the_nearest(tmp_path: Path) -> None:
    message = file_problem(tmp_path, "run:\n  seed: 1\n  iteration: 3\n")
    assert "unknown key run.iteration" in message
    assert f"{tmp_path / 'mine.yaml'}:3" in message
    assert "did you mean run.iterations?" in message


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("trainer.learning_rate=1", "trainer.lr"),
        ("trainer.groupsize=4", "trainer.group_size"),
        ("seed=1", "run.seed"),
        ("trainer.seed=1", "run.seed"),
        ("rollout.max-turns=3", "rollout.max_turns"),
        ("train.lr=1", "trainer.lr"),
        ("evaluation.promts=3", "evaluation.prompts"),
        ("run.staleness=3", "run.eta"),
    ],
)
def test_the_nearest_key_is_suggested(override: str, nearest: str) -> None:
    message = problem(override)
    assert f"unknown key {override.partition('=')[0]}" in message.replace("unknown key train ", "unknown key train.lr ")
    assert f"did you mean {nearest}?" in message
    assert f"override {override!r}" in message


def test_nothing_near_suggests_nothing() -> None:
    message = problem("zzzz.qqqq=1")
    assert "did you mean" not in message
    assert "the sections are run, model" in message


@pytest.mark.parametrize(
    ("override", "got", "allowed", "typed"),
    [
        ("run.eta=-1", "-1", "a whole number, at least 0", "run.eta=0"),
        ("run.iterations=1e3", "1000.0", "a whole number, at least 1", "run.iterations=1000"),
        ("run.seed=true", "True", "a whole number", "run.seed=0"),
        ("trainer.lr='1e-4'", "'1e-4'", "a number, at least 0", "trainer.lr=0.0001"),
        ("trainer.lr=fast", "'fast'", "a number, at least 0", "trainer.lr=0.0001"),
        ("trainer.lr=.nan", "nan", "a number", "trainer.lr=0.0001"),
        ("trainer.max_grad_norm=.inf", "inf", "a number, above 0", "trainer.max_grad_norm=1.0"),
        ("rollout.top_p=1.5", "1.5", "above 0, at most 1", "rollout.top_p=1.0"),
        ("trainer.betas=[0.9]", "[0.9]", "a list of 2", "trainer.betas=[0.9, 0.95]"),
        ("trainer.normalize_std=1", "1", "true or false", "trainer.normalize_std=true"),
        ("trainer.normalize_std=no", "'no'", "true or false", "trainer.normalize_std=true"),
        ("model.dtype=float16", "'float16'", "one of float32, bfloat16", "model.dtype=bfloat16"),
        ("trainer.algorithm=dr-grpo", "'dr-grpo'", "one of grpo, dr_grpo", "trainer.algorithm=dr_grpo"),
        ("trainer.algorithm=Dr_GRPO", "'Dr_GRPO'", "one of grpo, dr_grpo", "trainer.algorithm=dr_grpo"),
        ("rollout.engine=sglang", "'sglang'", "one of transformers, vllm", "rollout.engine=transformers"),
        ("cluster.threads=0", "0", "at least 1, or null", "cluster.threads=null"),
        ("environment.args=3", "3", "a mapping", "environment.args={}"),
        ("trainer.lr=null", "null", "a number", "trainer.lr=0.0001"),
        ("services.named=judge", "'judge'", "a mapping", "services.named={judge: {model: Qwen/Qwen3-4B}}"),
        ("services.named={j: {max_batch: 0}}", "0", "allowed is a whole number, at least 1;", "max_batch: 8"),
        ("services.named={j: {max_wait_s: '1'}}", "'1'", "allowed is a number, at least 0;", "max_wait_s: 1"),
        ("services.named={j: {function: jugde}}", "'jugde'", "allowed is one of judge, logprob", "function: judge"),
        ("environment.tools=mcp", "'mcp'", "a mapping", "environment.tools={mcp: python my_server.py}"),
        ("environment.tools={mpc: x}", "'mpc'", "only mcp", "environment.tools={mcp: python my_server.py}"),
    ],
)
def test_a_wrong_value_names_field_value_allowed_and_what_to_type(
    override: str, got: str, allowed: str, typed: str
) -> None:
    message = problem(override)
    assert message.startswith(override.partition("=")[0])
    assert f"got {got}" in message
    assert allowed in message
    assert f"type {typed}" in message or f"type e.g. {typed}" in message


def test_the_name_of_a_service_is_explained() -> None:
    message = problem("services.named={1judge: {model: x}}")
    assert "services.named.1judge" in message
    assert "is no name of a service, which is a letter and at most 62 letters, digits, - and _; type e.g." in message


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.group_size=1"], "group size 1 has no standard deviation; type trainer.group_size=8 or"),
        (["trainer.minibatches=200"], "type trainer.minibatches=128 or less"),
        (["rollout.max_new_tokens=2000"], "do not fit into a context of rollout.max_context_tokens=1024"),
        (["rollout.max_context_tokens=8192"], "type trainer.micro_batch_tokens=8192"),
        (["rollout.temperature=0.0"], "type rollout.temperature=1.0"),
        (["trainer.micro_batch_tokens=256", "rollout.max_context_tokens=128"], "type trainer.micro_batch_tokens=512"),
        (["evaluation.every=5"], "type evaluation.prompts=256"),
        (["watchdog.restart=true", "watchdog.timeout_s=null"], "type watchdog.timeout_s=auto"),
        (
            ["policy.boundaries_tokens={tp1: 30}", "policy.name=fifo"],
            "type policy.name=cmlfq, or policy.boundaries_tokens={}",
        ),
        (["policy.boundaries_tokens={tp2: 30, tp1: 30}"], "do not rise with the degree"),
    ],
)
def test_fields_that_contradict_each_other_say_what_to_type(overrides: list[str], said: str) -> None:
    message = problem(*overrides)
    assert said in message
    assert f"override {overrides[0]!r}" in message


def test_group_size_1_is_fine_without_the_standard_deviation() -> None:
    assert config_from_dict({}, ["trainer.group_size=1", "trainer.normalize_std=false"]).trainer.group_size == 1


def test_contradictions_cannot_be_built_in_python_either() -> None:
    with pytest.raises(ValueError, match="group size 1 has no standard deviation"):
        RunConfig.model_validate({"trainer": {"group_size": 1}})


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    text = "run: {eta: -1, nmae: x}\ntrainer:\n  group_size: 1\n  lr: quick\nstor: {}\nobserve: 3\n"
    message = file_problem(tmp_path, text, "rollout.slots=0", "nonsense", "model.path.deep=1")
    lines = message.splitlines()
    assert lines[0] == "9 problems in the configuration:"
    for said in (
        "run.eta (",
        "run.nmae",
        "group size 1",
        "trainer.lr (",
        "stor ",
        "observe (",
        "rollout.slots (",
        "'nonsense'",
    ):
        assert sum(said in line for line in lines[1:]) == 1, said
    assert "unknown key model.path.deep" in message


def test_a_contradiction_is_not_reported_of_a_field_that_is_wrong_by_itself() -> None:
    message = problem("trainer.group_size=1", "trainer.normalize_std=perhaps")
    assert "perhaps" in message
    assert "standard deviation" not in message


@pytest.mark.parametrize("name", ["a-b", "", "a b", "x" * 64, "../up"])
def test_a_run_name_has_to_fit_a_key(name: str) -> None:
    assert "run.name" in problem(f"run.name='{name}'")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.lr", "an override is section.key=value"),
        ("=3", "an override is section.key=value"),
        ("trainer..lr=3", "an override is section.key=value"),
        ("trainer=3", "trainer is a section; type one of its keys, e.g. trainer.algorithm=dapo"),
        ("trainer.lr=", "it has no value; type e.g. trainer.lr=0.0001"),
        ("run.name=#1", "is not one value"),
        ("run.name=a #1", "is not one value"),
        ("trainer.betas=[1, 2", "not valid YAML"),
        ("trainer.lr=!!int x", "not valid YAML"),
        ("trainer.lr.x=3", "has no keys"),
        (
            "policy.boundaries_tokens={tp1: lots}",
            "allowed is a mapping from one of tp1, tp2, tp4, tp8 to a number, above 0",
        ),
        ("planner.fixed_engines={tp2: 1}", "planner.fixed_engines.tp2 (override"),
        ("cluster.engines=[{tp: 2, cnt: 1}]", "cluster.engines is a list, each a mapping of tp ("),
    ],
)
def test_a_malformed_override_is_a_clear_error(override: str, said: str) -> None:
    message = problem(override)
    assert said in message
    assert override in message


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("run.name=5", "5"),
        ("run.name=true", "true"),
        ("run.name=null", None),
        ("run.name='null'", "null"),
        ("run.dir=2024", Path("2024")),
        ("cluster.scheduler=tcp://10.0.0.1:8786", "tcp://10.0.0.1:8786"),
        ("environment.name=my.module:Thing", "my.module:Thing"),
        ("trainer.betas=[0.5, 0]", (0.5, 0.0)),
        ("trainer.lr=1", 1.0),
        ("trainer.lr=1e-4", 1e-4),
    ],
)
def test_an_override_is_typed_as_yaml_or_as_the_text_its_field_holds(override: str, value: object) -> None:
    section, key = override.partition("=")[0].split(".")
    got = getattr(getattr(config_from_dict({}, [override]), section), key)
    assert got == value
    assert type(got) is type(value) or isinstance(value, Path)


def test_the_last_of_two_equal_overrides_wins() -> None:
    assert config_from_dict({}, ["run.seed=1", "run.seed=2"]).run.seed == 2


def test_a_script_reads_overrides_as_libra_run_does() -> None:
    typed = ["trainer.lr=1e-3", "run.name=2024", "environment.args.timeout_rate=0", "environment.args.seed=1"]
    assert typed_settings(typed) == {
        "trainer__lr": 1e-3, "run__name": "2024", "environment__args": {"timeout_rate": 0, "seed": 1}
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"an override is section\.key=value"):
        typed_settings(["trainer.lr"])


def test_environment_arguments_merge_key_by_key() -> None:
    config = config_from_dict(
        {"environment": {"args": {"a": 1, "b": [1]}}}, ["environment.args.b=2", "environment.args.c.d=3"]
    )
    assert config.environment.args == {"a": 1, "b": 2, "c": {"d": 3}}


def test_another_environment_starts_without_the_arguments_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("environment: {name: tool_arithmetic, args: {timeout_rate: 0.1}}\n")
    config = load_config(path, ["environment.args.limit=3", "environment.name=python_tests"])
    assert config.environment.args == {"limit": 3}
    assert load_config(path, ["environment.name=tool_arithmetic"]).environment.args == {"timeout_rate": 0.1}


def test_the_callers_mapping_is_left_as_it_was() -> None:
    values = {"environment": {"args": {"a": {"b": 1}}}}
    config_from_dict(values, ["environment.args.a.b=2", "environment.name=other"])
    assert values == {"environment": {"args": {"a": {"b": 1}}}}


def test_an_empty_section_is_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("run:\n  # seed: 3\ntrainer:\n")
    assert load_config(path) == RunConfig()


def test_what_is_no_mapping_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="a configuration is a mapping of sections"):
        config_from_dict([1])  # type: ignore[arg-type]


def test_the_configuration_cannot_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        config_from_dict({}).run.seed = 3  # type: ignore[misc]


def test_the_resolved_configuration_reads_back(tmp_path: Path) -> None:
    config = load_config("libra/quickstart", ["run.name=x", "trainer.lr=3.3e-7", "environment.args={rate: 1e-9}"])
    path = tmp_path / "config.resolved.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config
    assert set(field_references()) <= {
        f"{section}.{key}" for section, values in config.model_dump().items() for key in values
    }


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(
    args=st.dictionaries(st.text(min_size=1, max_size=8), json_values, max_size=3),
    lr=st.floats(0, 1e300),
    seed=st.integers(0),
)
def test_any_configuration_reads_back(
    tmp_path_factory: pytest.TempPathFactory, args: dict[str, object], lr: float, seed: int
) -> None:
    config = config_from_dict({"environment": {"args": args}, "trainer": {"lr": lr}, "run": {"seed": seed}})
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path) == config


def loads(path_or_none: Path | None, *overrides: str) -> str:
    """Message of the ConfigError, empty where a configuration came back; anything else is raised."""
    try:
        config_from_dict({}, overrides) if path_or_none is None else load_config(path_or_none)
    except ConfigError as error:
        return str(error) or "an error without a message"
    return ""


@given(st.text(max_size=60))
def test_no_override_ends_in_anything_but_a_configuration_or_a_config_error(text: str) -> None:
    for override in (text, f"trainer.lr={text}", f"run.{text}=1", f"environment.args={text}"):
        assert "without a message" not in loads(None, override)


@given(st.text(alphabet="a:{}[]-&*!|>'\"#%@ \n\t,.?01~runeta", max_size=60))
def test_no_file_ends_in_anything_but_a_configuration_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.yaml"
    path.write_text(text, encoding="utf-8")
    message = loads(path)
    assert not message or "noise.yaml" in message
