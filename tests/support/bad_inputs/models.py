"""Model directories that are broken, or that do not fit the run; models that are nowhere."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import libra
from bad_inputs.case import BadInput, setting, settings

SHIPPED = Path(libra.__file__).parent / "assets" / "tiny_arithmetic"


def copied(*changes: Callable[[Path], object]) -> Callable[[Path], None]:
    """A maker of ``model``, a copy of the model that ships with these changes."""

    def make(directory: Path) -> None:
        shutil.copytree(SHIPPED, directory / "model")
        for change in changes:
            change(directory / "model")

    return make


def without(name: str) -> Callable[[Path], object]:
    """Remove a file."""
    return lambda model: (model / name).unlink()


def holds(name: str, content: str | bytes) -> Callable[[Path], object]:
    """Replace a file's content."""
    return lambda model: (model / name).write_bytes(content.encode() if isinstance(content, str) else content)


def cut(name: str, num_bytes: int) -> Callable[[Path], object]:
    """Cut a file after its first bytes."""
    return lambda model: (model / name).write_bytes((model / name).read_bytes()[:num_bytes])


def with_json(name: str, **values: Any) -> Callable[[Path], object]:
    """Replace keys of a JSON file; None removes one."""

    def change(model: Path) -> None:
        found = {**json.loads((model / name).read_text()), **values}
        (model / name).write_text(json.dumps({key: value for key, value in found.items() if value is not None}))

    return change


def with_header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Change the header of the weights' file, and keep its data."""

    def write(model: Path) -> None:
        path = model / "model.safetensors"
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return write


def broken(value: str, typed: str, *changes: Callable[[Path], object], field: str = "model.path") -> BadInput:
    """``libra run`` of the quick start with a changed copy of its model."""
    return setting("model.path=model", value, typed, field)._replace(make=copied(*changes))


def _more_tokens(model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["<|far|>"] = 9999
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))


def _index(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    weights = {
        "model.norm.weight": "model-00001-of-00002.safetensors",
        "lm_head.weight": "model-00002-of-00002.safetensors",
    }
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


SAVE_AGAIN = "model.save_pretrained(...)"

DIRECTORIES = (
    broken("config.json", SAVE_AGAIN, without("config.json")),
    broken("*.safetensors", SAVE_AGAIN, without("model.safetensors")),
    broken("tokenizer.json", "tokenizer.save_pretrained(...)", without("tokenizer.json")),
    broken("chat template", "chat_template.jinja", without("chat_template.jinja")),
    broken("model.safetensors", SAVE_AGAIN, cut("model.safetensors", 1_000_000)),
    broken("model.safetensors", SAVE_AGAIN, cut("model.safetensors", 100)),
    broken("model.safetensors", SAVE_AGAIN, cut("model.safetensors", 4)),
    broken("model.safetensors", SAVE_AGAIN, cut("model.safetensors", 0)),
    broken("model.safetensors", SAVE_AGAIN, holds("model.safetensors", "<html>404</html>" * 9)),
    broken(
        "version https://git-lfs",
        "git lfs pull",
        holds("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"),
    ),
    broken(
        "model.embed_tokens.weight", SAVE_AGAIN, with_header(lambda header: header.pop("model.embed_tokens.weight"))
    ),
    broken("model.layers.2", SAVE_AGAIN, with_json("config.json", num_hidden_layers=2, layer_types=None)),
    broken("model.layers.3", SAVE_AGAIN, with_json("config.json", num_hidden_layers=4, layer_types=None)),
    broken("hidden_size", SAVE_AGAIN, with_json("config.json", hidden_size=64)),
    broken("vocab_size", SAVE_AGAIN, with_json("config.json", vocab_size=1000)),
    broken("config.json", SAVE_AGAIN, holds("config.json", "{")),
    broken("config.json", SAVE_AGAIN, holds("config.json", "[]")),
    broken("model_type", SAVE_AGAIN, with_json("config.json", model_type=None)),
    broken("tokenizer.json", "tokenizer.save_pretrained(...)", holds("tokenizer.json", "{")),
    broken("tokenizer.json", "tokenizer.save_pretrained(...)", cut("tokenizer.json", 9000)),
    broken("9999", "resize_token_embeddings", _more_tokens),
    broken("chat_template.jinja", "endfor", holds("chat_template.jinja", "{%- for m in messages %}{{ m.content }}")),
    broken("chat_template.jinja", "template", holds("chat_template.jinja", "{{ raise_exception('no users here') }}")),
    broken("generation_config.json", SAVE_AGAIN, holds("generation_config.json", "{")),
    broken("model-00002-of-00002.safetensors", SAVE_AGAIN, _index),
    broken("model.safetensors.index.json", "save the model again", holds("model.safetensors.index.json", "{}")),
    setting("model.path=model", "'model'", "directory", "model.path")._replace(
        make=lambda at: (at / "model").write_text("")
    ),
)

NOWHERE = (
    setting("model.path=./model", "'./model'", "Qwen/Qwen3-0.6B"),
    setting("model.path=~/no/such/model", "'~/no/such/model'", "Qwen/Qwen3-0.6B"),
    setting("model.path=libra/big-arithmetic", "'libra/big-arithmetic'", "libra/tiny-arithmetic"),
    setting("model.path=a b", "'a b'", "Qwen/Qwen3-0.6B"),
    setting("model.path=Qwen/Qwen3-0.6B-none", "'Qwen/Qwen3-0.6B-none'", "libra model prepare"),
    setting("model.path=http://example.com/x", "'http://example.com/x'", "Qwen/Qwen3-0.6B"),
    settings("run.from_checkpoint=nowhere", "run.from_checkpoint", "'nowhere'", "--from RUN/checkpoints/best"),
    settings("run.from_checkpoint=.", "run.from_checkpoint", "'.'", "RUN/checkpoints/best"),
)

TOO_LONG = (
    settings(
        "rollout.max_context_tokens=4000 & trainer.micro_batch_tokens=4096",
        "rollout.max_context_tokens",
        "4000",
        "rollout.max_context_tokens=1024",
    ),
    settings("rollout.max_context_tokens=40", "rollout.max_context_tokens", "40", "rollout.max_context_tokens="),
)
