"""Checks of model and teacher (``distil``) in the driver, before any worker starts.

The checks read JSON files and weight headers, never weights, and import neither torch nor
transformers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from libra.config import RunConfig, resolve_model
from libra.config.service_devices import teacher_model
from libra.errors import ConfigError, ModelError
from libra.model_loader import check_lengths
from libra.seals import parsed_json
from libra.worker.model_files import local_model

_SAVE = "save it again with model.save_pretrained(...), or fetch it again"
_SAVE_TOKENIZER = "save it again with tokenizer.save_pretrained(...), or fetch it again"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings)\.weight$")
_LAYER = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")
_GIT_LFS = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The small files of a model directory; a missing file is an empty dict."""

    directory: Path
    config: dict[str, Any]  # ``config.json``, or its text part
    shapes: dict[str, tuple[int, ...]]  # of tensors in the safetensors files, by name
    tokenizer: dict[str, Any]
    tokenizer_config: dict[str, Any]


def checked_model(path: str) -> ModelFiles:
    """The model at ``model.path``, checked by its small files; a hub id is downloaded.

    Raises ModelError with the file, its fault and what to type.
    """
    found = resolve_model(path)
    directory = local_model(found) if isinstance(found, str) else found
    config = _json_object(directory / "config.json", _SAVE)
    if "model_type" not in config:
        raise _wrong(directory / "config.json", "it has no model_type, so its kind is unknown", _SAVE)
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    shapes = {name: shape for file in _weight_files(directory) for name, shape in header_shapes(file).items()}
    if shapes:
        _check_shapes(directory, config, shapes)
    if (directory / "generation_config.json").exists():
        _json_object(directory / "generation_config.json", _SAVE)
    model = ModelFiles(directory, config, shapes, *_tokenizer(directory))
    _check_vocabulary(model)
    return model


def check_positions(model: ModelFiles, max_context_tokens: int) -> None:
    """Raise ConfigError if a context exceeds the model's positions or its fixed rotary range."""
    check_lengths(model.config, max_context_tokens, str(model.directory / "config.json"))
    positions = _positions(model.config)
    if positions is not None and max_context_tokens > positions:
        raise ConfigError(
            f"rollout.max_context_tokens: {max_context_tokens}, and the model has {positions} positions "
            f"(max_position_embeddings in {model.directory / 'config.json'}); type rollout.max_context_tokens={positions} or less"
        )


def header_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Tensor shapes in a safetensors file. Raises ModelError if its size or format is wrong."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(len(_GIT_LFS)) == _GIT_LFS:
                raise _wrong(
                    path, f"it holds only Git LFS's pointer ({_GIT_LFS.decode()} ...)", "type git lfs pull there"
                )
        with safe_open(path, "np") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except ModelError:  # which is an OSError
        raise
    except OSError as error:
        raise _wrong(path, f"it cannot be read ({error.strerror})", "make it readable, or fetch it again") from error
    except SafetensorError as error:
        what = "it is cut, or not a safetensors file" if size else "it is empty"
        raise _wrong(path, f"{what} ({size:,} bytes; {error})", _SAVE) from error


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return [directory / name for name in sorted(set(_json_object(index, _SAVE)["weight_map"].values()))]
    return sorted(directory.glob("*.safetensors"))


def _check_shapes(directory: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    where, layers = directory / "config.json", {int(match[1]) for match in map(_LAYER.match, shapes) if match}
    wanted = config.get("num_hidden_layers")
    if layers and isinstance(wanted, int):
        missing = [number for number in range(wanted) if number not in layers]
        if missing:
            raise _wrong(
                where, f"num_hidden_layers is {wanted}, and the weights have no model.layers.{missing[0]}", _SAVE
            )
        if max(layers) >= wanted and not config.get("num_nextn_predict_layers"):
            raise _wrong(
                where, f"num_hidden_layers is {wanted}, and the weights also have model.layers.{max(layers)}", _SAVE
            )
    name = _embedding(shapes)
    if name is None and layers:
        raise _wrong(directory, "its weights have no model.embed_tokens.weight", _SAVE)
    if name is None or "wte" in name or len(shapes[name]) != 2:
        return
    for given, found in zip(("vocab_size", "hidden_size"), shapes[name], strict=True):
        if given == "hidden_size" and not {"word_embed_proj_dim", "embedding_size"}.isdisjoint(config):
            continue  # embeddings of a size of their own
        if isinstance(size := config.get(given), int) and size != found:
            raise _wrong(where, f"{given} is {size}, and {name} has {found}", _SAVE)


def _embedding(shapes: dict[str, tuple[int, ...]]) -> str | None:
    return next((name for name in sorted(shapes) if _EMBEDDING.search(name) and "visual" not in name), None)


def _tokenizer(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    if not any((directory / name).is_file() for name in _TOKENIZERS[:-1]):
        raise ModelError(
            f"model.path: {str(directory)!r} lacks tokenizer.json; type tokenizer.save_pretrained(...) into that directory"
        )
    settings = directory / "tokenizer_config.json"
    tokenizer_config = _json_object(settings, _SAVE_TOKENIZER) if settings.is_file() else {}
    file = directory / "tokenizer.json"
    tokenizer = _json_object(file, _SAVE_TOKENIZER) if file.is_file() else {}
    if tokenizer and not isinstance(tokenizer.get("model"), dict):
        raise _wrong(file, "it has no 'model'", _SAVE_TOKENIZER)
    return tokenizer, tokenizer_config


def _check_vocabulary(model: ModelFiles) -> None:
    name = _embedding(model.shapes)
    rows = model.shapes[name][0] if name is not None else model.config.get("vocab_size")
    vocabulary = model.tokenizer.get("model", {}).get("vocab", {})
    if not isinstance(rows, int) or not vocabulary:
        return
    try:
        highest = max(vocabulary.values()) if isinstance(vocabulary, dict) else len(vocabulary) - 1
    except TypeError as error:
        raise _wrong(
            model.directory / "tokenizer.json", "its vocabulary does not map to ids", _SAVE_TOKENIZER
        ) from error
    if highest >= rows:
        raise _wrong(
            model.directory / "tokenizer.json",
            f"it has ids up to {highest}, and the model has {rows} embeddings",
            "take the tokenizer of this model, or model.resize_token_embeddings(len(tokenizer)) and save both",
        )


def _positions(config: dict[str, Any]) -> int | None:
    given = (config.get(key) for key in ("max_position_embeddings", "n_positions"))
    number = next((value for value in given if isinstance(value, int)), None)
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    factor = scaling.get("factor") if isinstance(scaling, dict) else None
    if number is None or not isinstance(factor, int | float):
        return number
    original = scaling.get("original_max_position_embeddings")
    return max(number, int(factor * (original if isinstance(original, int) else number)))


def _json_object(path: Path, advice: str) -> dict[str, Any]:
    try:
        value = parsed_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _wrong(path, f"it cannot be read as JSON ({' '.join(str(error).split())})", advice) from error
    if not isinstance(value, dict):
        raise _wrong(path, "it is not a JSON object", advice)
    return value


def _wrong(path: Path, what: str, advice: str) -> ModelError:
    return ModelError(f"model.path: {path}: {what}; {advice}")


def check_teacher(config: RunConfig, student: ModelFiles) -> None:
    """Check the teacher against the student.

    Raises ModelError if the teacher is damaged, ConfigError if tokenizer or positions do not fit.
    """
    distil, named = config.distil, teacher_model(config)
    if named is None:
        return
    try:
        teacher = checked_model(named)
    except ModelError as error:
        raise ModelError(str(error).replace("model.path", "distil.teacher")) from error
    try:
        check_positions(teacher, config.rollout.max_context_tokens)
    except ConfigError as error:
        raise ConfigError(f"distil.teacher: {error}") from error
    if (difference := tokenizer_difference(student, teacher)) is not None:
        raise ConfigError(
            f"distil.teacher: {named} has another tokenizer than model.path={config.model.path} ({difference}), so that "
            "it cannot score what the student wrote; type a distil.teacher of the same family"
        )
    if distil.estimator == "top_k" and (most := most_tokens(student, teacher)) is not None and distil.tokens > most:
        raise ConfigError(
            f"distil.tokens: {distil.tokens}, and the teacher's vocabulary has {most} tokens that the student has; type "
            f"distil.tokens={most} or less"
        )


def tokenizer_difference(student: ModelFiles, teacher: ModelFiles) -> str | None:
    """First token whose id differs between two tokenizers, or their sizes, in words; else None."""
    ours, theirs = _ids(student.tokenizer), _ids(teacher.tokenizer)
    if not ours or not theirs:
        sizes = student.config.get("vocab_size"), teacher.config.get("vocab_size")
        return None if sizes[0] == sizes[1] else f"vocab_size is {sizes[0]} and {sizes[1]}"
    for token in sorted(ours.keys() | theirs.keys(), key=lambda token: (ours.get(token, -1), theirs.get(token, -1))):
        if ours.get(token) != theirs.get(token):
            is_, there = (f"has number {ids[token]}" if token in ids else "is not there" for ids in (ours, theirs))
            return f"token {token!r} {is_} in the student and {there} in the teacher"
    if student.tokenizer.get("pre_tokenizer") != teacher.tokenizer.get("pre_tokenizer"):
        return "they cut text into words differently (pre_tokenizer)"
    return None


def most_tokens(student: ModelFiles, teacher: ModelFiles) -> int | None:
    """Largest allowed top-k: the smaller vocabulary, less 1 if sizes differ; None if unknown."""
    sizes = [size for each in (student, teacher) if isinstance(size := each.config.get("vocab_size"), int)]
    if len(sizes) < 2:
        return None
    return min(sizes) - (sizes[0] != sizes[1])


def _ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # of a unigram model: pairs of token and score
        vocabulary = {str(entry[0]): number for number, entry in enumerate(vocabulary)}
    added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", ())}
    return {**vocabulary, **added}
