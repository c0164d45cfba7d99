"""Train a model to answer questions by searching a corpus, as Search-R1 does: passages between its turns, exact matches as reward.

On two cores: a model of 0.7 million parameters, which ``make_start_model.py`` makes first (some ten minutes), in a generated
world. On GPUs Qwen3-4B follows up to three relations. A corpus of your own is a file of JSON lines with title, text and facts
(docs/tools.md)::

    python workflows/corpus_search.py
    python workflows/corpus_search.py configs/qwen3_4b.yaml environment.args.corpus=/data/corpus.jsonl

Other arguments are settings, as for ``libra run``. Needs ``pip install -e '.[search]'``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import math_tools
from software_repair import start_from

from libra.config import load_config
from libra.errors import LibraError

CONFIG = Path(__file__).resolve().parent.parent / "examples" / "search.yaml"


def main(arguments: list[str]) -> int:
    """As `math_tools.main`, after the model is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="transformers")
    parser.add_argument("override", nargs="*", help="section.key=value")
    chosen = parser.parse_intermixed_args(arguments)
    try:
        start_from("search", load_config(chosen.config, overrides=chosen.override))
    except LibraError as error:
        print(f"corpus_search: {error}", file=sys.stderr)
        return 2
    words = ["--engine", chosen.engine, "--config", str(chosen.config), *chosen.override]
    return math_tools.main(words, CONFIG, "corpus_search", __doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
