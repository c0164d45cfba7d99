"""Train on an environment of the package verifiers, unchanged: its rollouts are agents that ask the model through their gateway.

verifiers runs in a virtual environment of its own, where this file is imported too; Libra needs only its rows::

    python -m venv verifiers-venv && verifiers-venv/bin/pip install verifiers==0.2.1
    python workflows/verifiers_agent.py --venv verifiers-venv                              # verifiers_arithmetic, in this folder
    python workflows/verifiers_agent.py --venv verifiers-venv --environment NAME model.path=Qwen/Qwen3-0.6B

Rollouts are tasks of one process that has imported verifiers and loaded the environment, which take seconds. On workers of a
scheduler of your own that needs ``export VERIFIERS_AGENT='["NAME", "{}"]'`` there (its arguments are the second text), and
``agent.env=[VERIFIERS_AGENT]`` here. Other arguments are settings, as for ``libra run``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

try:
    import verifiers
except ImportError:  # Libra's own environment, which needs the rows alone
    verifiers = None  # type: ignore[assignment]

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "verifiers.yaml"
LOADED = "VERIFIERS_AGENT"
"""The variable with name and arguments of the environment, as JSON, that is loaded where this file is imported."""


@lru_cache(maxsize=4)
def loaded(environment: str, args: str) -> Any:
    """An environment of verifiers; only where it is installed."""
    return verifiers.load_environment(environment, **json.loads(args))


async def agent(environment: str, args: str, example: dict[str, Any]) -> dict[str, Any]:
    """One rollout, and its reward by the environment's rubric. It runs in verifiers' virtual environment."""
    client = verifiers.ClientConfig(
        api_base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY", max_retries=2
    )
    output = await loaded(environment, args).run_rollout(example, client, "policy", {})
    if output.get("error"):
        raise RuntimeError(f"verifiers: {output['error']}")
    return {"reward": output["reward"], "metrics": output.get("metrics"), "stop": output.get("stop_condition")}


if verifiers is not None and LOADED in os.environ:
    loaded(*json.loads(os.environ[LOADED]))


def rows(environment: str, args: str, count: int) -> list[dict[str, Any]]:
    """The first rows of its dataset, as rollouts take them."""
    return [dict(row) for row in loaded(environment, args).get_dataset(count).to_list()]


def main(arguments: list[str]) -> int:
    """Read the rows in verifiers' virtual environment, and train on them here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, required=True, help="virtual environment with verifiers")
    parser.add_argument("--environment", default="verifiers_arithmetic", help="for verifiers.load_environment")
    parser.add_argument("--args", default="{}", help="its arguments, as JSON")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("override", nargs="*", help="section.key=value")
    chosen = parser.parse_intermixed_args(arguments)
    command = [str(chosen.venv / "bin" / "python"), __file__, "rows", chosen.environment, chosen.args, str(chosen.rows)]
    try:
        lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError) as error:
        print(
            f"verifiers_agent: --venv {chosen.venv} and --environment {chosen.environment} give no rows ({error}); type a "
            "directory that python -m venv made, in which verifiers and the environment are installed",
            file=sys.stderr,
        )
        return 2
    prompts = [
        {"prompt": row["prompt"], "environment": chosen.environment, "args": chosen.args, "example": row}
        for row in map(json.loads, lines)
    ]

    import libra
    from libra.config import load_config, typed_settings
    from libra.envs.grader import own_reward
    from libra.errors import LibraError

    try:
        settings, config = typed_settings(chosen.override), load_config(chosen.config)
        model = settings.pop("model__path", config.model.path)
        if settings.get("cluster__scheduler", config.cluster.scheduler) is None:
            os.environ[LOADED] = json.dumps([chosen.environment, chosen.args])
            settings["agent__env"] = [*settings.get("agent__env", config.agent.env), LOADED]
        settings["agent__venv"] = str(chosen.venv.resolve())
        print(libra.train(model, prompts=prompts, reward=own_reward, config=chosen.config, **settings))
    except LibraError as error:
        print(f"verifiers_agent: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    if sys.argv[1:2] == ["rows"]:
        for line in rows(sys.argv[2], sys.argv[3], int(sys.argv[4])):
            print(json.dumps(line))
    else:
        sys.exit(main(sys.argv[1:]))
