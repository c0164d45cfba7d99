"""The files of ``model.path`` on a worker, and a directory of links to them with another version's
weights."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path

from libra.config.model_paths import whole_model
from libra.errors import ModelError
from libra.untrusted import shown_line
from libra.weights import WeightVersion

ONE_MODEL_AT_A_TIME = asyncio.Lock()
"""transformers builds a model under a device context of the whole process: two runs that build at once
would get models without data."""
NOT_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf", ".pt")
"""Suffixes of a model's files that a version replaces."""


def local_model(model: str) -> Path:
    """Directory of a model on this machine; a Hugging Face id is fetched into the hub's cache if it is
    missing."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        fetched = Path(snapshot_download(model, ignore_patterns=["*.gguf", "*.onnx", "*.h5", "*.msgpack"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        why = shown_line(str(error).partition("\n")[0])
        raise ModelError(
            f"model.path: {model!r} is neither a directory in {Path.cwd()} nor in the cache {constants.HF_HUB_CACHE}, and was not "
            f"downloaded from {constants.ENDPOINT} ({why}); type libra/tiny-arithmetic, which is here, a directory, or "
            f"where there is a network: hf download {model}, and copy that cache"
        ) from None
    return whole_model(fetched, model)


def collect_frozen() -> None:
    """Free the modules of a closed engine or replica: they are in reference cycles, and collections skip
    frozen objects."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def link_model(model_dir: Path, version: WeightVersion, directory: Path) -> None:
    """Fill ``directory`` with links: all files of a model except its weights, and the weights of a
    version.

    The weights are a hard link if the file system supports it: a restarted engine process reads them
    again, when the store may have dropped the version.
    """
    for path in Path(model_dir).iterdir():
        if not path.name.endswith(NOT_WEIGHTS):
            (directory / path.name).symlink_to(path.resolve())
    weights = directory / version.path.name
    try:
        os.link(version.path.resolve(), weights)
    except OSError:  # another file system, or one without such links
        weights.symlink_to(version.path.resolve())
