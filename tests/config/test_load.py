"""Reading configurations: layers, overrides, and messages for every kind of mistake."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.config import RunConfig, config_from_dict, dump_config, load_config, typed_settings
from libra.config.field_help import field_references
from libra.errors import ConfigError

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=8), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(min_size=1, max_size=8), json_values, max_size=3)


def file_problem(directory, text, *overrides):
    path = directory / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_every_shipped_file_loads(repository):
    paths = sorted([*(repository / "configs").glob("*.yaml"), *(repository / "examples").glob("*.yaml")])
    assert {"quickstart.yaml", "qwen3_4b.yaml", "repair.yaml"} <= {path.name for path in paths}
    for path in paths:
        assert isinstance(load_config(path), RunConfig)


def test_a_file_goes_over_what_it_extends_and_an_override_over_both(tmp_path):
    (tmp_path / "first.yaml").write_text("run: {iterations: 3, eta: 2}\ntrainer: {lr: 0.5, prompts: 4}\n")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper/second.yaml").write_text("extends: ../first.yaml\nrun: {eta: 1}\ntrainer: {lr: 1e-3}\n")
    config = load_config(tmp_path / "deeper/second.yaml", ["trainer.lr=1e-5"])
    assert (config.run.iterations, config.run.eta, config.trainer.lr, config.trainer.prompts) == (3, 1, 1e-5, 4)


def test_further_files_go_over_the_first_in_their_order_and_overrides_over_all(tmp_path):
    for name, text in {"b": "trainer: {lr: 2e-4, prompts: 8}", "c": "trainer: {prompts: 16}\nrun: {seed: 3}"}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    given = [str(tmp_path / "b.yaml"), "run.seed=4", str(tmp_path / "c.yaml")]
    config = load_config("libra/quickstart", given)
    assert (config.trainer.lr, config.trainer.prompts, config.run.seed) == (2e-4, 16, 4)
    with pytest.raises(ConfigError, match="no such configuration file"):
        load_config("libra/quickstart", ["missing.yaml"])


def test_files_that_extend_each_other_are_an_error(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(ConfigError, match=r"a\.yaml.*b\.yaml.*a\.yaml"):
        load_config(tmp_path / "a.yaml")


def test_a_missing_extended_file_names_who_asked_for_it(tmp_path):
    message = file_problem(tmp_path, "extends: gone.yaml\n")
    assert "gone.yaml" in message
    assert str(tmp_path / "mine.yaml") in message


@pytest.mark.parametrize("name", ["nowhere.yaml", "libra/nothing"])
def test_a_missing_file_is_a_clear_error(name):
    with pytest.raises(ConfigError, match="libra/quickstart"):
        load_config(name)


def test_all_problems_are_reported_at_once_with_their_lines(tmp_path):
    text = "run: {eta: -1, nmae: x}\ntrainer:\n  group_size: 1\n  lr: quick\nstor: {}\nobserve: 3\n"
    first, *lines = file_problem(tmp_path, text, "rollout.slots=0", "nonsense", "model.path.deep=1").splitlines()
    assert first.startswith("9 ") and len(lines) == 9
    ids = ("run.eta", "run.nmae", "group size 1", "trainer.lr (", "stor ", "observe (", "rollout.slots (", "'nonsense'")
    for name in (*ids, "model.path.deep"):
        assert sum(name in line for line in lines) == 1, name
    assert any("trainer.lr (" in line and "mine.yaml:4" in line for line in lines)


@pytest.mark.parametrize(("text", "field", "value", "typed"), [
    ("- run\n", "mine.yaml:1", "a list", "run:"), ("hello\n", "mine.yaml:1", "'hello'", "run:"),
    ("run: 3\n", "run (", "3 (a whole number)", "iterations"),
    ("run:\n  iterations: ten\n", "mine.yaml:2", "'ten'", "run.iterations=50"),
    ("run:\n\titerations: 3\n", "mine.yaml:2", "tab", "spaces"),
    ("runs:\n  iterations: 3\n", "runs (", "mine.yaml:1", "run.iterations"),
    ("model: libra/tiny-arithmetic\n", "model (", "'libra/tiny-arithmetic'", "path"),
    ("extends: [a.yaml]\n", "extends", "['a.yaml']", "path of one file"),
    ("extends: libra/quickstrt\n", "libra/quickstrt", "mine.yaml", "libra/quickstart"),
])  # fmt: skip
def test_a_file_of_another_shape_is_named_with_its_line(text, field, value, typed, tmp_path):
    message = file_problem(tmp_path, text)
    assert field in message and value in message and typed in message


@pytest.mark.parametrize(("override", "value"), [
    ("run.name=5", "5"), ("run.name=true", "true"), ("run.name=null", None), ("run.name='null'", "null"),
    ("run.dir=2024", Path("2024")), ("cluster.scheduler=tcp://10.0.0.1:8786", "tcp://10.0.0.1:8786"),
    ("environment.name=my.module:Thing", "my.module:Thing"), ("trainer.lr=1", 1.0), ("trainer.lr=1e-4", 1e-4),
])  # fmt: skip
def test_an_override_is_typed_as_yaml_or_as_the_text_its_field_holds(override, value):
    section, key = override.partition("=")[0].split(".")
    got = getattr(getattr(config_from_dict({}, [override]), section), key)
    assert got == value
    assert type(got) is type(value) or isinstance(value, Path)


def test_a_script_reads_overrides_as_libra_run_does():
    typed = ["trainer.lr=1e-3", "run.name=2024", "environment.args.timeout_rate=0", "environment.args.seed=1"]
    assert typed_settings(typed) == {
        "trainer__lr": 1e-3, "run__name": "2024", "environment__args": {"timeout_rate": 0, "seed": 1}
    }  # fmt: skip
    with pytest.raises(ConfigError):
        typed_settings(["trainer.lr"])


def test_environment_arguments_merge_key_by_key():
    config = config_from_dict(
        {"environment": {"args": {"a": 1, "b": [1]}}}, ["environment.args.b=2", "environment.args.c.d=3"]
    )
    assert config.environment.args == {"a": 1, "b": 2, "c": {"d": 3}}


def test_another_environment_starts_without_the_arguments_of_the_first(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("environment: {name: tool_arithmetic, args: {timeout_rate: 0.1}}\n")
    assert load_config(path, ["environment.args.limit=3", "environment.name=jsonl"]).environment.args == {"limit": 3}
    assert load_config(path, ["environment.name=tool_arithmetic"]).environment.args == {"timeout_rate": 0.1}


def test_an_empty_section_is_its_defaults(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("run:\n  # seed: 3\ntrainer:\n")
    assert load_config(path) == RunConfig()


def test_the_configuration_cannot_change():
    with pytest.raises(ValueError, match="frozen"):
        config_from_dict({}).run.seed = 3


def test_the_resolved_configuration_reads_back(tmp_path):
    config = load_config("libra/quickstart", ["run.name=x", "trainer.lr=3.3e-7", "environment.args={rate: 1e-9}"])
    path = tmp_path / "config.resolved.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config
    assert set(field_references()) <= {f"{s}.{key}" for s, values in config.model_dump().items() for key in values}


@settings(max_examples=10)  # each writes and reads every setting
@given(args=ARGUMENTS, lr=st.floats(0, 1e300), seed=st.integers(0))
def test_any_configuration_reads_back(tmp_path_factory, args, lr, seed):
    config = config_from_dict({"environment": {"args": args}, "trainer": {"lr": lr}, "run": {"seed": seed}})
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path) == config


def loads(path_or_none, *overrides):
    """Message of the ConfigError, empty where a configuration came back; anything else is raised."""
    try:
        config_from_dict({}, overrides) if path_or_none is None else load_config(path_or_none)
    except ConfigError as error:
        return str(error) or "an error without a message"
    return ""


@given(st.text(max_size=60))
def test_no_override_ends_in_anything_but_a_configuration_or_a_config_error(text):
    for override in (text, f"trainer.lr={text}", f"run.{text}=1", f"environment.args={text}"):
        assert "without a message" not in loads(None, override)


@given(st.text(alphabet="a:{}[]-&*!|>'\"#%@ \n\t,.?01~runeta", max_size=60))
def test_no_file_ends_in_anything_but_a_configuration_or_a_config_error(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "noise.yaml"
    path.write_text(text, encoding="utf-8")
    message = loads(path)
    assert not message or "noise.yaml" in message
