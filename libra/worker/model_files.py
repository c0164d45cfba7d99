"""Where the files of ``model.path`` are on a worker, and a directory of links that has them with another version's weights."""

from __future__ import annotations

import os
from pathlib import Path

from libra.config.model_paths import whole_model
from libra.errors import ModelError
from libra.weights import WeightVersion

NOT_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf", ".pt")
"""Endings of files of a model that a version replaces."""


def local_model(model: str) -> Path:
    """Directory of a model on this machine; a Hugging Face id is fetched into the hub's cache if it is not there."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        fetched = Path(snapshot_download(model, ignore_patterns=["*.gguf", "*.onnx", "*.h5", "*.msgpack"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"model.path: {model!r} is no directory here and could not be fetched as a Hugging Face id ({error}); "
            "type the path of a directory that holds config.json and *.safetensors, or model.path=smollm2-135m, which needs no hub "
            "(libra model prepare smollm2-135m)"
        ) from error
    return whole_model(fetched, model)


def link_model(model_dir: Path, version: WeightVersion, directory: Path) -> None:
    """Fill ``directory`` with links: everything of a model but its weights, and the weights of a version.

    Those are a hard link where the file system has them: an engine process that dies reads them again, and the store may have
    dropped the version by then.
    """
    for path in Path(model_dir).iterdir():
        if not path.name.endswith(NOT_WEIGHTS):
            (directory / path.name).symlink_to(path.resolve())
    weights = directory / version.path.name
    try:
        os.link(version.path.resolve(), weights)
    except OSError:  # another file system, or one without such links
        weights.symlink_to(version.path.resolve())
