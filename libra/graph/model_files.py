"""Where the files of ``model.path`` are on a worker."""

from __future__ import annotations

from pathlib import Path

from libra.config.paths import whole_model
from libra.errors import ModelError


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
