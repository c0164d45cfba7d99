r"""Train a model on games of gymnasium or textarena, or on an environment behind an OpenEnv server.

On two cores SmolLM2-135M plays FrozenLake in two iterations, on GPUs Qwen3-4B a game of textarena. A model of 135 M parameters
mostly replies with no action at all (29 of 32 replies were cut off at once, seed 0): where all rewards are 0 the run says so, and
the exit code is 1::

    python workflows/games.py
    python workflows/games.py environment.name=examples.games.textarena_game:TextArenaGame environment.args.id=TowerOfHanoi-v0
    python workflows/games.py environment.name=examples.games.openenv:OpenEnvClient \
        environment.args.url=http://HOST:8000 environment.args.action=message
    python workflows/games.py configs/qwen3_4b.yaml cluster.scheduler=tls://HOST:8786

Other arguments are settings, as for ``libra run``. Needs ``pip install -e '.[model,games]'``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import math_tools

CONFIG = Path(__file__).resolve().parent.parent / "examples" / "games.yaml"

if __name__ == "__main__":
    sys.exit(math_tools.main(sys.argv[1:], CONFIG, "games", __doc__))
