"""Configuration files with faults of YAML, of shape and of place; run directories that cannot be used."""

from __future__ import annotations

from pathlib import Path

from bad_inputs.case import BadInput, setting, settings, write, yaml_file

FAULTS_OF_YAML = (
    yaml_file("run:\n\titerations: 3\n", "bad.yaml:2", "tab", "spaces"),
    yaml_file("run:\n  seed: 1\n  seed: 2\n", "bad.yaml:3", "run.seed", "keep one"),
    yaml_file("run:\n  seed: 1\nrun:\n  eta: 1\n", "bad.yaml:3", "the key run", "keep one"),
    yaml_file("run:\n  seed: !!python/name:os.system\n", "bad.yaml:2", "python/name", "check"),
    yaml_file("run:\n  seed: !int 3\n", "bad.yaml:2", "!int", "check"),
    yaml_file("run:\n  name: a: b\n", "bad.yaml:2", "mapping values are not allowed", "quotes"),
    yaml_file("run:\n seed: 1\n  eta: 1\n", "bad.yaml:3", "mapping values", "check indentation"),
    yaml_file("run: {seed: 1\n", "bad.yaml", "not valid YAML", "check"),
    yaml_file('run:\n  name: "demo\n', "bad.yaml", "not valid YAML", "quotes"),
    yaml_file("run:\n  seed: 1\n--- \nrun:\n  seed: 2\n", "bad.yaml:3", "document", "check"),
    yaml_file("&a\nrun: *a\n", "bad.yaml", "alias", "write the value out"),
    yaml_file("run:\n  seed: *s\n", "bad.yaml:2", "alias", "check"),
    yaml_file("run:\n  1: 2\n", "bad.yaml:2", "1", 'as "1"'),
    yaml_file("%YAML 9\n", "bad.yaml", "not valid YAML", "check"),
)

WRONG_SHAPES = (
    yaml_file("- run\n- model\n", "bad.yaml:1", "a list", "run:"),
    yaml_file("hello\n", "bad.yaml:1", "'hello'", "run:"),
    yaml_file("3\n", "bad.yaml:1", "3", "run:"),
    yaml_file("run: 3\n", "run (bad.yaml:1)", "3 (a whole number)", "iterations"),
    yaml_file("run: [seed, 1]\n", "run (bad.yaml:1)", "[seed, 1]", "iterations"),
    yaml_file("trainer:\n  - lr: 1\n", "trainer (bad.yaml:1)", "a list", "lr"),
    yaml_file("run:\n  iterations: ten\n", "run.iterations (bad.yaml:2)", "'ten'", "run.iterations=50"),
    yaml_file("run:\n  iterations: '3'\n", "run.iterations (bad.yaml:2)", "'3'", "without quotes"),
    yaml_file("trainer:\n  lr: 1,5\n", "trainer.lr (bad.yaml:2)", "'1,5'", "trainer.lr=0.0001"),
    yaml_file("runs:\n  iterations: 3\n", "runs (bad.yaml:1)", "runs", "run.iterations"),
    yaml_file("iterations: 3\n", "iterations (bad.yaml:1)", "iterations", "run.iterations"),
    yaml_file("model: libra/tiny-arithmetic\n", "model (bad.yaml:1)", "'libra/tiny-arithmetic'", "path"),
    yaml_file("environment: gsm8k\n", "environment (bad.yaml:1)", "'gsm8k'", "name"),
    yaml_file("cluster:\n  engines: {tp: 1}\n", "cluster.engines", "{tp: 1}", "cluster.engines=[]"),
    yaml_file("cluster:\n  engines: [{tpp: 1}]\n", "cluster.engines.0.tpp", "bad.yaml:2", "tp (a whole number"),
    yaml_file("environment:\n  args: [1]\n", "environment.args", "[1]", "environment.args={}"),
    yaml_file("extends: [a.yaml]\n", "extends", "['a.yaml']", "path of one file"),
    yaml_file("extends: base.yml\n", "base.yml", "bad.yaml", "libra/quickstart"),
    yaml_file("extends: libra/quickstrt\n", "libra/quickstrt", "bad.yaml", "libra/quickstart"),
    yaml_file("extends: bad.yaml\n", "extends", "bad.yaml -> ", "take extends out"),
)

OF_PLACE = (
    BadInput(("run", "nowhere.yaml"), "nowhere.yaml", "no such configuration file", "libra/quickstart"),
    BadInput(("run", "libra/quickstrat"), "libra/quickstrat", "no such configuration file", "libra/quickstart"),
    BadInput(("run", "."), ".", "directory", "configs/quickstart.yaml"),
    BadInput(("run",), "CONFIG", "Missing argument", "libra run --help"),
    BadInput(
        ("run", "bad.yaml"),
        "bad.yaml",
        "cannot be read as text",
        "UTF-8",
        lambda directory: write(directory, {"bad.yaml": b"run:\n  name: caf\xe9\n"}),
    ),
    BadInput(
        ("run", "bad.yaml"),
        "bad.yaml",
        "not valid YAML",
        "check",
        lambda directory: write(directory, {"bad.yaml": b"run:\x00\x01\x02"}),
    ),
)


def _taken(directory: Path) -> None:
    write(directory, {"elsewhere/mine/notes.txt": "mine"})


def _file(directory: Path) -> None:
    write(directory, {"elsewhere": "a file"})


def _run_is_file(directory: Path) -> None:
    write(directory, {"elsewhere/mine": "a file"})


def _dangling(directory: Path) -> None:
    (directory / "elsewhere").symlink_to(directory / "gone")


RUN_DIRECTORIES = (
    setting("run.dir=elsewhere", "elsewhere", "run.dir=ANOTHER_PLACE", "run.dir")._replace(make=_file),
    settings("run.dir=elsewhere & run.name=mine", "run.name", "elsewhere/mine", "run.name=ANOTHER_NAME")._replace(
        make=_taken
    ),
    settings("run.dir=elsewhere & run.name=mine", "run.name", "elsewhere/mine", "run.name=ANOTHER_NAME")._replace(
        make=_run_is_file
    ),
    setting("run.dir=elsewhere", "elsewhere", "run.dir=ANOTHER_PLACE", "run.dir")._replace(make=_dangling),
    setting("run.dir=/proc/libra", "/proc/libra", "run.dir=ANOTHER_PLACE", "run.dir"),
    setting("run.dir=/dev/null/x", "/dev/null/x", "run.dir=ANOTHER_PLACE", "run.dir"),
    setting(f"run.dir={'x' * 300}", "xxx", "run.dir=ANOTHER_PLACE", "run.dir"),
)
