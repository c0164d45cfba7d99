"""Train a model to write Python functions; tests that it never sees, in a sandbox, are the reward.

On two cores SmolLM2-135M in two iterations (it shows that everything works), on GPUs Qwen3-4B. Problems of your own are a file of
JSON lines with prompt, function and tests (docs/tools.md)::

    python workflows/code_tests.py
    python workflows/code_tests.py configs/qwen3_4b.yaml environment.args.problems=/data/problems.jsonl

Other arguments are settings, as for ``libra run``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import math_tools

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "code_tests.yaml"

if __name__ == "__main__":
    sys.exit(math_tools.main(sys.argv[1:], CONFIG, "code_tests", __doc__))
