"""Paths of models and shipped configurations by their names."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from libra.errors import ModelError, pip_install

_SHIPPED = re.compile(r"libra/([a-z0-9][a-z0-9_.-]*)")
_PACKAGE = Path(__file__).resolve().parent.parent

TOY = "libra/tiny-arithmetic"
"""The model that ships."""
PREPARED_MODELS = frozenset({"smollm2-135m"})
"""Models that workflows/prepare_model.py writes; ``model.path`` takes these names."""
MODELS_VARIABLE = "LIBRA_MODELS"
"""Environment variable with the directory of prepared models. Not set: ``~/.cache/libra/models``."""


def prepared_dir(name: str) -> Path:
    """Directory of the prepared model ``name``, which may not exist yet."""
    root = os.environ.get(MODELS_VARIABLE) or "~/.cache/libra/models"
    return Path(root).expanduser().absolute() / name


def packaged_config(name: str) -> Path | None:
    """File of the shipped configuration ``libra/NAME``, or None for any other name. An installed
    package has these files in ``libra/assets/configs``, a checkout in ``configs``."""
    match = _SHIPPED.fullmatch(name)
    if match is None:
        return None
    candidates = (
        directory / f"{match[1]}.yaml" for directory in (_PACKAGE / "assets/configs", _PACKAGE.parent / "configs")
    )
    return next((path for path in candidates if path.is_file()), None)


def resolve_model(path: str) -> Path | str:
    """Directory of a model, or its Hugging Face id without such a directory.

    Parameters
    ----------
    path : str
        ``model.path``: ``libra/NAME`` for a model that ships, ``NAME`` or ``libra/NAME`` for a
        prepared model (`PREPARED_MODELS`), a directory in Hugging Face layout, or ``org/name``.

    Raises
    ------
    ModelError
        A missing or incomplete directory, or a model that does not ship or is not prepared yet.
    """
    if path.removeprefix("libra/") in PREPARED_MODELS and not Path(path).is_dir():
        return _prepared(path.removeprefix("libra/"))
    match = _SHIPPED.fullmatch(path)
    if match is not None:
        directory = _PACKAGE / "assets" / match[1].replace("-", "_")
        if not directory.is_dir():
            shipped = ", ".join(f"libra/{name}" for name in shipped_models()) or "none"
            raise ModelError(f"model.path: no model {path!r} ships with Libra; those that do: {shipped}")
        return whole_model(directory, path)
    directory = Path(path).expanduser()
    if directory.is_dir():
        return whole_model(directory, path)
    if directory.exists():
        raise ModelError(f"model.path: {path!r} is a file; type the directory that holds config.json and *.safetensors")
    first = Path(path).parts[0]
    if (
        path.startswith((".", "/", "~"))
        or path.count("/") > 1
        or path.endswith("/")
        or ("/" in path and Path(first).is_dir())
    ):
        raise ModelError(
            f"model.path: there is no directory {path!r}; type a directory that holds config.json and *.safetensors, a "
            "Hugging Face id such as Qwen/Qwen3-0.6B, or libra/tiny-arithmetic"
        )
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", path):
        raise ModelError(
            f"model.path: {path!r} is neither a directory nor a Hugging Face id; type e.g. Qwen/Qwen3-0.6B or "
            "libra/tiny-arithmetic"
        )
    return path


def _prepared(name: str) -> Path:
    directory = prepared_dir(name)
    if not directory.is_dir():
        raise ModelError(
            f"model.path: {name!r} is not prepared yet, there is no {directory}; type: python workflows/prepare_model.py "
            f"(needs {pip_install('model')}; {MODELS_VARIABLE} names another place)"
        )
    return whole_model(directory, name)


def shipped_models() -> list[str]:
    """Names, without ``libra/``, of the models that ship."""
    return sorted(path.parent.name.replace("_", "-") for path in (_PACKAGE / "assets").glob("*/config.json"))


def model_line(path: str) -> str:
    """The model of a run, for its first line, with the purpose of a shipped model."""
    if path != TOY:
        return path
    return f"{path} (0.5 M parameters, made for arithmetic with a calculator; give a model to train another)"


def whole_model(directory: Path, path: str) -> Path:
    """``directory`` if it holds a complete model; else ModelError with the missing files."""
    missing = []
    if not (directory / "config.json").is_file():
        missing.append("config.json")
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(
                f"model.path: {index} is not an index of weights ({error!r}); save the model again"
            ) from error
        missing += sorted(name for name in names if not (directory / name).is_file())
    elif not any(directory.glob("*.safetensors")) and not any(directory.glob("pytorch_model*.bin")):
        missing.append("*.safetensors (or pytorch_model*.bin)")
    if missing:
        raise ModelError(
            f"model.path: the directory {path!r} lacks {', '.join(missing)}; type the directory that "
            "model.save_pretrained(...) wrote"
        )
    return directory
