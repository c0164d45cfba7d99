"""Text of token ids, by the tokenizer of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from libra.config.model_paths import resolve_model
from libra.errors import ModelError

Decode = Callable[[Sequence[int]], str]


def load_decode(run_dir: Path) -> Decode:
    """The function from token ids to text, special tokens included, for the trajectories of a run.

    From ``RUN/tokenizer``, else from ``model.path`` of ``RUN/config.resolved.yaml``. Nothing is downloaded.

    Raises
    ------
    ModelError
        There is no tokenizer, or it cannot be read.
    """
    kept = run_dir / "tokenizer"
    source = kept if kept.is_dir() else _model_of(run_dir)
    file = Path(source) / "tokenizer.json"
    try:
        if file.is_file():
            # The bare tokenizer opens in milliseconds; transformers would first import torch.
            from tokenizers import Tokenizer

            fast = Tokenizer.from_file(str(file))
            return lambda ids: str(fast.decode(list(ids), skip_special_tokens=False))
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(str(source), local_files_only=True)
        return lambda ids: str(slow.decode(list(ids), skip_special_tokens=False))
    except Exception as error:  # boundary: tokenizers raises bare Exception, transformers whatever a file provokes
        raise ModelError(f"{source}: no tokenizer could be read from it ({error})") from error


def _model_of(run_dir: Path) -> Path | str:
    path = run_dir / "config.resolved.yaml"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        return resolve_model(str(config["model"]["path"]))
    except (OSError, ValueError, RecursionError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: has no model.path of the run ({error!r})") from error
