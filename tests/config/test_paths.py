"""What names of models stand for."""

import json
from pathlib import Path

import pytest

from libra.config import resolve_model
from libra.errors import ModelError


def make_model(directory, *files):
    directory.mkdir(parents=True)
    for name in files:
        (directory / name).write_text("{}")
    return directory


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin", "pytorch_model-00001-of-00001.bin"])
def test_a_directory_with_a_model_is_itself(tmp_path, weights):
    directory = make_model(tmp_path / "model", "config.json", weights)
    assert resolve_model(str(directory)) == directory


def test_the_model_that_ships_is_whole():
    directory = resolve_model("libra/tiny-arithmetic")
    assert isinstance(directory, Path)
    assert (directory / "config.json").is_file()
    assert sum(path.stat().st_size for path in directory.glob("*.safetensors")) <= 6 * 2**20


def test_a_hugging_face_id_is_left_to_transformers():
    assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(
    "name",
    ["./gone", "~/gone", "a/b/c", "gone/", "models/gone", "two words", "-x", "org:model", "libra/huge", "file.gguf"],
)
def test_what_is_neither_a_directory_with_a_model_nor_an_id_is_named(name, tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "file.gguf").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        resolve_model(name)
    assert name in str(caught.value)


@pytest.mark.parametrize(("files", "lacks"), [
    ((), "config.json, *.safetensors (or pytorch_model*.bin)"), (("config.json",), "*.safetensors"),
    (("model.safetensors",), "config.json"),
])  # fmt: skip
def test_an_incomplete_directory_says_what_it_lacks(tmp_path, files, lacks):
    directory = make_model(tmp_path / "model", *files)
    with pytest.raises(ModelError) as caught:
        resolve_model(str(directory))
    assert f"lacks {lacks}" in str(caught.value)


def test_every_shard_of_the_index_has_to_be_there(tmp_path):
    directory = make_model(tmp_path / "model", "config.json", "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-2\.safetensors"):
        resolve_model(str(directory))
    (directory / "model-2.safetensors").write_text("")
    assert resolve_model(str(directory)) == directory


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}'])
def test_a_broken_index_is_a_model_error(tmp_path, text):
    directory = make_model(tmp_path / "model", "config.json")
    (directory / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError):
        resolve_model(str(directory))


@pytest.mark.parametrize("name", ["smollm2-135m", "libra/smollm2-135m"])
def test_a_prepared_model_is_found_where_it_was_put(name, tmp_path, monkeypatch):
    monkeypatch.setenv("LIBRA_MODELS", str(tmp_path))
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(ModelError, match="prepare_model"):
        resolve_model(name)
    directory = make_model(tmp_path / "smollm2-135m", "config.json")
    with pytest.raises(ModelError, match=r"lacks \*\.safetensors"):
        resolve_model(name)
    (directory / "model.safetensors").write_text("")
    assert resolve_model(name) == directory


def test_a_directory_of_that_name_comes_first(tmp_path, monkeypatch):
    make_model(tmp_path / "smollm2-135m", "config.json", "model.safetensors")
    monkeypatch.setenv("LIBRA_MODELS", str(tmp_path / "elsewhere"))
    monkeypatch.chdir(tmp_path)
    assert resolve_model("smollm2-135m") == Path("smollm2-135m")
