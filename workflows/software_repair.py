"""Train a model to repair small Python libraries: it reads files, edits them, runs their tests; hidden copies of the tests decide.

On two cores: a model of 0.6 million parameters, which ``make_start_model.py`` makes first (some ten minutes), then learns on the
libraries that ship. On GPUs Qwen3-4B reads and runs on its own.
With ``--sdist`` the libraries are source packages of PyPI::

    python workflows/software_repair.py
    pip download --no-binary :all: --no-deps inflection==0.5.1
    python workflows/software_repair.py --sdist inflection-0.5.1.tar.gz
    python workflows/software_repair.py configs/qwen3_4b.yaml cluster.scheduler=tls://HOST:8786

Other arguments are settings, as for ``libra run``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import math_tools

from examples.repair import build
from libra.config import load_config
from libra.envs import make_environment
from libra.errors import LibraError

CONFIG = Path(__file__).resolve().parent.parent / "examples" / "repair.yaml"


def main(arguments: list[str]) -> int:
    """As `math_tools.main`, after tasks and model are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sdist", type=Path, action="append", default=[], help="a source package; may be repeated")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="transformers")
    parser.add_argument("override", nargs="*", help="section.key=value")
    chosen = parser.parse_intermixed_args(arguments)
    overrides = list(chosen.override)
    try:
        if chosen.sdist:
            load_config(chosen.config, overrides=overrides)  # a wrong setting is told before tasks are made
            overrides = [*of_packages(chosen.sdist, chosen.config, overrides), *overrides]
        start_from("repair", load_config(chosen.config, overrides=overrides))
    except LibraError as error:
        print(f"software_repair: {error}", file=sys.stderr)
        return 2
    return math_tools.main(
        ["--engine", chosen.engine, "--config", str(chosen.config), *overrides], CONFIG, "software_repair", __doc__
    )


def of_packages(packages: list[Path], config_file: Path, given: list[str]) -> list[str]:
    """Make tasks of source packages. Settings for them: the file, a start model of their own, held-out bugs that there are."""
    name = "_".join(path.name.removesuffix(".tar.gz") for path in packages)
    tasks = Path("runs") / f"repair_{name}.jsonl"
    tasks.parent.mkdir(exist_ok=True)
    build.main(["--out", str(tasks), *(word for path in packages for word in ("--sdist", str(path)))])
    settings = [f"environment.args.tasks={tasks.absolute()}"]
    config = load_config(config_file, overrides=[*settings, *given])
    kind, args = config.environment.name, dict(config.environment.args)
    held_out = make_environment(kind, args, config.run.seed).num_prompts("eval")
    if held_out is not None and config.evaluation.prompts > held_out:
        print(f"{held_out} of the bugs are held out: evaluation.prompts={held_out}", flush=True)
        settings.append(f"evaluation.prompts={held_out}")
    place = Path(config.model.path)
    return [*settings, f"model.path={place}_{name}"] if place.parent.name == "start_models" else settings


def start_from(task: str, config: object) -> None:
    """Make the model that a configuration for two cores begins with, unless it is there."""
    place = Path(str(config.model.path))  # type: ignore[attr-defined]
    if place.parent.name == "start_models" and not (place / "config.json").is_file():
        import make_start_model

        print(f"making {place} by supervision, once: some ten minutes of one core", flush=True)
        make_start_model.make(task, place, dict(config.environment.args))  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
