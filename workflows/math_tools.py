"""Train a real pretrained model on problems of reasoning-gym, with a calculator as its tool, through vLLM.

On two cores: SmolLM2-135M, two iterations in some minutes (examples/math_tools.yaml). On GPUs the same with Qwen3-4B::

    python workflows/math_tools.py                                    # prepares the model if it is not there yet
    python workflows/math_tools.py --engine transformers run.iterations=40 evaluation.prompts=32
    python workflows/math_tools.py configs/qwen3_4b.yaml cluster.scheduler=tls://HOST:8786

Needs ``pip install -e '.[model,reasoning-gym]'``, and for vLLM ``make setup-vllm-cuda`` on a GPU, else ``make setup-vllm``.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import libra
from libra.config import load_config
from libra.config.model_paths import PREPARED_MODELS, prepared_dir
from libra.config.yaml_text import read_value
from libra.errors import LibraError

CONFIG = Path(__file__).resolve().parent.parent / "examples" / "math_tools.yaml"
INSTALL_VLLM = "pip install -e '.[vllm]' on a machine with a GPU, else make setup-vllm"


def chosen_engine(asked: str | None) -> str:
    """The engine that was asked for, else vLLM where it can be imported, else transformers, with a word about why."""
    if asked is not None:
        return asked
    if importlib.util.find_spec("vllm") is not None:
        return "vllm"
    print(f"vLLM is not installed, so transformers generates. For vLLM type {INSTALL_VLLM}.", flush=True)
    return "transformers"


def make_ready(model: str) -> None:
    """Prepare the model where that is what it needs and it has not been done."""
    name = model.removeprefix("libra/")
    if name in PREPARED_MODELS and not prepared_dir(name).is_dir():
        from prepare_model import prepare

        print(f"preparing {name}, once", flush=True)
        print(f"{prepare()[0]} is ready", flush=True)


def mixed_groups_frac(values: Mapping[str, Any], groups: int) -> float:
    """Share of a batch's groups whose rewards differ: only those teach a group-relative algorithm anything."""
    return 1 - float(values["groups_without_signal"]) / groups


def report(summary: Any, groups: int, seconds: float) -> str:
    """What a reader wants to know of each iteration, as lines."""
    lines = [f"{'iteration':>9}{'reward':>9}{'mixed groups':>14}{'turns':>7}{'gap mean':>10}{'gap max':>9}{'step':>8}"]
    for number, values in enumerate(summary.iterations):
        gaps = f"{values.get('mismatch_mean_abs', 0):>10.4f}{values.get('mismatch_max_abs', 0):>9.3f}"
        mixed = f"{mixed_groups_frac(values, groups):>13.0%} "
        lines.append(
            f"{number:>9}{values['reward']:>9.3f}{mixed}{values['turns']:>7}{gaps}{values.get('total_s', 0):>6.0f} s"
        )
    lines.append(f"{seconds:.0f} s in all; {summary.directory}")
    return "\n".join(lines)


def main(arguments: list[str], config_file: Path = CONFIG, name: str = "math_tools", text: str | None = __doc__) -> int:
    """Exit code 1 where no group had rewards that differ: then there was nothing to learn from."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["vllm", "transformers"], help="default: vllm where it is installed")
    parser.add_argument("--config", type=Path, default=config_file)
    parser.add_argument("override", nargs="*", help="section.key=value")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = load_config(options.config, overrides=options.override)
    except LibraError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    settings: dict[str, Any] = {"rollout__engine": chosen_engine(options.engine)}
    same = not any(override.startswith("environment.name=") for override in options.override)
    for override in options.override:
        key, _, value = override.partition("=")
        section, _, argument = key.partition(".args.")
        if argument:
            args = settings.setdefault(f"{section}__args", dict(config.environment.args) if same else {})
            args[argument] = read_value(value, key)
        else:
            settings[key.replace(".", "__")] = read_value(value, key)
    model = settings.pop("model__path", config.model.path)
    groups = settings.get("trainer__prompts", config.trainer.prompts)
    started_s = time.perf_counter()
    try:
        make_ready(model)
        summary = libra.train(model, config=options.config, **settings)
    except LibraError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    print(report(summary, groups, time.perf_counter() - started_s))
    return 0 if any(mixed_groups_frac(values, groups) > 0 for values in summary.iterations) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
