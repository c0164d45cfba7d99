"""Model and tokenizer from a model directory: by transformers, or by a user's ``model.loader``.

Trainer and engines build the model with the same loader, each for its own attention, so that
versions are published, loaded and verified under the same tensor names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from libra.errors import ConfigError, ModelError
from libra.named_parts import built, named_part, unfit

FIELD = "model.loader"
_CALLS = {
    "model": ("model(directory, dtype=..., attention=...)", {"dtype": None, "attention": "sdpa"}),
    "tokenizer": ("tokenizer(directory)", {}),
}


class ModelLoader(Protocol):
    """A user's ``model.loader``: an object with these methods, or a class without arguments.
    ``directory`` has ``config.json``, weights in safetensors and a tokenizer's files, which travel
    with each checkpoint. `libra.testing.parts.LoaderContract` tests a loader."""

    def model(self, directory: Path, /, *, dtype: Any, attention: str) -> Any:
        """A causal language model, a torch module with the interface of transformers.

        ``attention`` is transformers' ``attn_implementation``; an engine needs exactly this
        attention. The ``state_dict`` has the tensors of the directory, by name and shape.
        Parameters that do not require a gradient are not trained.
        """

    def tokenizer(self, directory: Path, /) -> Any:
        """A transformers tokenizer with a chat template."""


class PretrainedLoader:
    """transformers' own loading, without any hub; a base class for loaders."""

    def model(self, directory: Path, /, *, dtype: Any, attention: str) -> Any:
        """The model, in the class that its ``config.json`` names."""
        from transformers import AutoModelForCausalLM  # here, because the driver does not need it

        return AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation=attention, local_files_only=True
        )

    def tokenizer(self, directory: Path, /) -> Any:
        """The tokenizer of the directory."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def build_model(loader: str | None, directory: Path, *, dtype: Any, attention: str) -> Any:
    """The model of a directory by ``model.loader`` or transformers; or ModelError."""
    if not (directory / "config.json").is_file():
        raise ModelError(f"model: {directory} holds no config.json; type model.path=DIR of a Hugging Face model")
    own = loader_of(loader)
    try:
        model = own.model(directory, dtype=dtype, attention=attention)
    except Exception as error:  # the boundary to transformers and to a user's code
        raise ModelError(
            f"{_blamed(loader, directory)} cannot be loaded as a causal language model: {error}"
        ) from error
    if not callable(getattr(model, "state_dict", None)) or getattr(model, "config", None) is None:
        raise ModelError(f"{FIELD}: {loader!r} made a {type(model).__name__}; model() returns a model of transformers")
    return model


def build_tokenizer(loader: str | None, directory: Path) -> Any:
    """The tokenizer of a directory by ``model.loader`` or transformers; or ModelError."""
    own = loader_of(loader)
    try:
        return own.tokenizer(directory)
    except Exception as error:  # the boundary to transformers and to a user's code
        raise ModelError(f"{_blamed(loader, directory)} has no usable tokenizer: {error}") from error


def plain_attention(config: Any) -> str:
    """transformers' attention for a model: "eager" if scores are capped, else "sdpa"."""
    return "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"


def check_lengths(config: Mapping[str, Any], max_context_tokens: int, where: str) -> None:
    """ConfigError if a model's rotary embedding may depend on the longest context in a batch.
    ``config`` is ``config.json``. Up to the original length embeddings are the same in every
    batch."""
    ropes = [config.get("rope_parameters") or {}, config.get("rope_scaling") or {}]
    for kind in ropes + [each for rope in ropes for each in rope.values() if isinstance(each, dict)]:
        name = str(kind.get("rope_type") or kind.get("type"))
        if "dynamic" not in name and name not in ("longrope", "su"):
            continue
        fixed = config.get("max_position_embeddings")
        if "dynamic" not in name:
            original = "original_max_position_embeddings"
            fixed = kind.get(original) or config.get(original) or fixed
        if isinstance(fixed, int) and max_context_tokens > fixed:
            raise ConfigError(
                f"rollout.max_context_tokens: {max_context_tokens}, and above {fixed} tokens rope of type {name} in {where} "
                "turns every token by the longest context of its batch, so engine and trainer would compute different models; type "
                f"rollout.max_context_tokens={fixed} or less"
            )


def loader_of(name: str | None) -> ModelLoader:
    """The named loader, checked, or transformers' own; ConfigError if a method is missing."""
    if name is None:
        return PretrainedLoader()
    found = named_part(FIELD, name)
    if isinstance(found, type):
        found = built(FIELD, name, "f()", {}, {})
    for method, (call, keywords) in _CALLS.items():
        function = getattr(found, method, None)
        if not callable(function):
            raise ConfigError(f"{FIELD}: {name!r} has no method {call}; see libra.model_loader.ModelLoader")
        if (wrong := unfit(function, (Path(),), keywords)) is not None:
            raise ConfigError(f"{FIELD}: {name!r} is called as {call}, and does not take that: {wrong}")
    return found  # type: ignore[no-any-return]


def _blamed(loader: str | None, directory: Path) -> str:
    return f"model: {directory}" if loader is None else f"{FIELD}: by {loader!r} {directory}"
