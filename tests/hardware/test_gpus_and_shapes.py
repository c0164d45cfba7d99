"""Datasheets and model shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from libra.errors import ConfigError, ModelError
from libra.hardware import known_gpus, known_models, load_gpu, load_shape
from libra.hardware.gpus import read_gpu

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}


def test_names_of_gpus_are_forgiving_but_not_guessed() -> None:
    assert load_gpu("a800_80g") is load_gpu("A800-80G") is load_gpu("a800")
    with pytest.raises(ConfigError, match="A100-40G, A100-80G"):
        load_gpu("A100")
    with pytest.raises(ConfigError, match="did you mean H100-80G"):
        load_gpu("H1000-80G")


@pytest.mark.parametrize("name", sorted(known_gpus()))
def test_datasheets_are_in_the_units_they_say(name: str) -> None:
    gpu = known_gpus()[name]
    assert 8e9 < gpu.memory_bytes < 3e11
    assert 5e11 < gpu.memory_bytes_per_s < 1e13
    assert 4e13 < gpu.flops_per_s < 5e15
    assert 1e9 < gpu.clock_hz < 3e9
    assert 1e9 < gpu.network_bytes_per_s <= gpu.link_bytes_per_s < 1e12
    # a tensor core does a power of two of multiply-adds per cycle; a mistyped unit would not
    per_cycle = gpu.flops_per_s / gpu.num_sms / gpu.clock_hz
    assert 400 < per_cycle < 4500


def test_a_datasheet_with_an_unknown_field_is_refused(tmp_path: Path) -> None:
    text = Path(__file__).parents[2].joinpath("libra/hardware/gpus/a40_48g.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("memory_bytes_per_s", "memory_bits_per_s"))
    with pytest.raises(ConfigError, match="memory_bytes_per_s"):
        read_gpu(path)
    path.write_text(text.replace("name: A40-48G", "name: MINE"))
    assert load_gpu(str(path)).name == "MINE"


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [
        ("Llama-2-7b", 6.738, 524_288),
        ("Qwen3-4B", 4.022, 147_456),
        ("Qwen3-14B", 14.768, 163_840),
        ("Qwen2.5-72B-Instruct", 72.7, 327_680),
    ],
)
def test_parameters_and_kv_of_published_models(name: str, billions: float, kv_bytes: int) -> None:
    shape = load_shape(name)
    assert shape.num_params / 1e9 == pytest.approx(billions, rel=1e-3)
    assert shape.kv_bytes_per_token(1) == kv_bytes
    assert shape.kv_bytes_per_token(2) == kv_bytes / 2


def test_shapes_from_a_directory_a_mapping_and_an_id(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert load_shape(tmp_path).head_dim == 32  # not hidden / heads
    assert load_shape(CONFIG).num_params == load_shape(tmp_path).num_params
    assert load_shape("Qwen/Qwen3-14B") == load_shape("Qwen3-14B")
    with pytest.raises(ModelError, match=known_models()[0]):
        load_shape("Qwen/Qwen9-900B")


def test_mixtures_of_experts_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="num_experts=128"):
        load_shape({**CONFIG, "model_type": "qwen3_moe", "num_experts": 128})
    with pytest.raises(ModelError, match="model_type is 'mamba'"):
        load_shape({**CONFIG, "model_type": "mamba"})
    missing = {key: value for key, value in CONFIG.items() if key != "vocab_size"}
    with pytest.raises(ModelError, match="no vocab_size"):
        load_shape(missing)


def test_key_value_heads_are_copied_beyond_their_number() -> None:
    shape = load_shape("Qwen3-14B")  # 40 heads, 8 of them for keys and values
    assert shape.kv_bytes_per_token(8) * 8 == shape.kv_bytes_per_token(1)
    with pytest.raises(ConfigError, match="tp: got 3"):
        shape.check_tp(3)
    with pytest.raises(ConfigError, match="tp: got 16"):
        shape.check_tp(16)  # 40 heads
    assert load_shape("Qwen3-32B").kv_bytes_per_token(16) == load_shape("Qwen3-32B").kv_bytes_per_token(8)
