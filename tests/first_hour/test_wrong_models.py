"""A model directory that is broken or does not fit the run is one error that names the file and what to type."""

import json
import shutil
import struct
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

import libra
from libra.config import config_from_dict
from libra.driver.model_checks import check_positions, checked_model
from libra.driver.run_start import RunRequest, prepare
from libra.errors import LibraError

Change = Callable[[Path], object]
SHIPPED = Path(libra.__file__).parent / "assets" / "tiny_arithmetic"


def without(name):
    return lambda model: (model / name).unlink()


def holds(name, content):
    return lambda model: (model / name).write_bytes(content.encode() if isinstance(content, str) else content)


def cut(name, num_bytes):
    return lambda model: (model / name).write_bytes((model / name).read_bytes()[:num_bytes])


def with_json(name, **values):
    """Replace keys of a JSON file; None removes one."""

    def change(model):
        found = {**json.loads((model / name).read_text()), **values}
        (model / name).write_text(json.dumps({key: value for key, value in found.items() if value is not None}))

    return change


def with_header(change):
    """Change the header of the weights' file, and keep its data."""

    def write(model):
        path = model / "model.safetensors"
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return write


def more_tokens(model):
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["<|far|>"] = 9999
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))


def index_of_two(model):
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    names = {1: "model.norm.weight", 2: "lm_head.weight"}
    weights = {name: f"model-0000{number}-of-00002.safetensors" for number, name in names.items()}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


SAVE_AGAIN = "model.save_pretrained(...)"

TOLD = "{{ tools }}{% for m in messages %}{{ TOOL if m.role == 'tool' else m.content }}<|im_end|>{% endfor %}"

# A change of the model that ships, the value that the error names, and a word of what to type.
DIRECTORIES = (
    (without("config.json"), "config.json", SAVE_AGAIN),
    (without("model.safetensors"), "*.safetensors", SAVE_AGAIN),
    (without("tokenizer.json"), "tokenizer.json", "tokenizer.save_pretrained(...)"),
    (without("chat_template.jinja"), "chat template", "chat_template.jinja"),
    (cut("model.safetensors", 1_000_000), "model.safetensors", SAVE_AGAIN),
    (cut("model.safetensors", 100), "model.safetensors", SAVE_AGAIN),
    (cut("model.safetensors", 0), "model.safetensors", SAVE_AGAIN),
    (holds("model.safetensors", "<html>404</html>" * 9), "model.safetensors", SAVE_AGAIN),
    (holds("model.safetensors", "version https://git-lfs.github.com/spec/v1\nsize 9\n"), "git-lfs", "git lfs pull"),
    (with_header(lambda h: h.update(lost=h.pop("model.embed_tokens.weight"))), "model.embed_tokens.weight", SAVE_AGAIN),
    (with_json("config.json", num_hidden_layers=2, layer_types=None), "model.layers.2", SAVE_AGAIN),
    (with_json("config.json", num_hidden_layers=4, layer_types=None), "model.layers.3", SAVE_AGAIN),
    (with_json("config.json", hidden_size=64), "hidden_size", SAVE_AGAIN),
    (with_json("config.json", vocab_size=1000), "vocab_size", SAVE_AGAIN),
    (holds("config.json", "{"), "config.json", SAVE_AGAIN),
    (with_json("config.json", model_type=None), "model_type", SAVE_AGAIN),
    (cut("tokenizer.json", 9000), "tokenizer.json", "tokenizer.save_pretrained(...)"),
    (more_tokens, "9999", "resize_token_embeddings"),
    (holds("chat_template.jinja", "{%- for m in messages %}{{ m.content }}"), "chat_template.jinja", "endfor"),
    (holds("chat_template.jinja", "{{ raise_exception('no users here') }}"), "chat_template.jinja", "template"),
    (holds("chat_template.jinja", TOLD.replace("TOOL", "raise_exception('no tools')")), "no tools", "another model"),
    (holds("chat_template.jinja", TOLD.replace("TOOL", "''")), "messages of tools", "another model"),
    (holds("generation_config.json", "{"), "generation_config.json", SAVE_AGAIN),
    (index_of_two, "model-00002-of-00002.safetensors", SAVE_AGAIN),
)


def refused(path, **run):
    """What a start says of a model; nothing is started."""
    config = config_from_dict({"model": {"path": str(path)}, "run": {"dir": "runs"} | run, "environment": {"args": {}}})
    with ExitStack() as exits, ExitStack() as start, pytest.raises(LibraError) as caught:
        prepare(RunRequest(config), exits, start)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("libra.driver.run_start.check_main", lambda: None)


@pytest.mark.parametrize(("change", "value", "typed"), DIRECTORIES)
def test_a_broken_model_is_named_with_its_file(change, value, typed, tmp_path):
    shutil.copytree(SHIPPED, tmp_path / "model")
    change(tmp_path / "model")
    message = refused("model")
    assert "model" in message and value in message and typed in message
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("path", "typed"), [
    ("./gone", "Qwen/Qwen3-0.6B"),
    ("~/no/such/model", "Qwen/Qwen3-0.6B"),
    ("libra/big-arithmetic", "libra/tiny-arithmetic"),
    ("a b", "Qwen/Qwen3-0.6B"),
    ("Qwen/Qwen3-0.6B-none", "hf download Qwen/Qwen3-0.6B-none"),
    ("http://example.com/x", "Qwen/Qwen3-0.6B"),
])  # fmt: skip
def test_a_model_that_is_nowhere_is_named(path, typed):
    message = refused(path)
    assert "model.path" in message and repr(path) in message and typed in message


def test_a_checkpoint_that_is_nowhere_is_named():
    for path in ("nowhere", "."):
        message = refused("libra/tiny-arithmetic", from_checkpoint=path)
        assert "run.from_checkpoint" in message and repr(path) in message and "RUN/checkpoints/best" in message


@pytest.mark.parametrize(("scaling", "positions"), [
    (None, 1024),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
    ({"rope_type": "dynamic", "factor": 2.0}, 1024),
    ({"type": "longrope", "factor": 4.0, "original_max_position_embeddings": 256}, 256),
])  # fmt: skip
def test_scaled_positions_count(tmp_path, scaling, positions):
    shutil.copytree(SHIPPED, tmp_path / "model")
    with_json("config.json", rope_scaling=scaling)(tmp_path / "model")
    model = checked_model(str(tmp_path / "model"))
    check_positions(model, positions)
    with pytest.raises(LibraError, match=f"rollout.max_context_tokens={positions} "):
        check_positions(model, positions + 1)
