"""Datasheets, prices and model shapes."""

import json
from datetime import date
from pathlib import Path

import pytest

from libra.errors import ConfigError, ModelError
from libra.hardware import known_gpus, load_gpu, load_shape
from libra.hardware.gpus import load_prices, read_gpu

CONFIG = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 100, "tie_word_embeddings": True,
}  # fmt: skip
GOOD = "currency: EUR\ngpu_hour:\n  H100-80G: {price: 2.5, source: invoice, date: 2026-01-31}\n"


def test_names_of_gpus_are_forgiving_but_not_guessed():
    assert load_gpu("a800_80g") is load_gpu("A800-80G") is load_gpu("a800")
    for wrong, suggestion in (("A100", "A100-40G, A100-80G"), ("H1000-80G", "H100-80G")):
        with pytest.raises(ConfigError, match=suggestion):
            load_gpu(wrong)


def test_datasheets_are_in_the_units_they_say():
    for gpu in known_gpus().values():
        assert 8e9 < gpu.memory_bytes < 3e11 and 5e11 < gpu.memory_bytes_per_s < 1e13, gpu.name
        assert 4e13 < gpu.flops_per_s < 5e15 and 1e9 < gpu.clock_hz < 3e9, gpu.name
        assert 1e9 < gpu.network_bytes_per_s <= gpu.link_bytes_per_s < 1e12, gpu.name
        # a tensor core does a power of two of multiply-adds per cycle; a mistyped unit would not
        assert 400 < gpu.flops_per_s / gpu.num_sms / gpu.clock_hz < 4500, gpu.name


def test_a_datasheet_with_an_unknown_field_is_refused(tmp_path):
    text = Path(__file__).parents[2].joinpath("libra/hardware/gpus/a40_48g.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("memory_bytes_per_s", "memory_bits_per_s"))
    with pytest.raises(ConfigError, match="memory_bytes_per_s"):
        read_gpu(path)
    path.write_text(text.replace("name: A40-48G", "name: MINE"))
    assert load_gpu(str(path)).name == "MINE"


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [("Llama-2-7b", 6.738, 524_288), ("Qwen3-4B", 4.022, 147_456), ("Qwen2.5-72B-Instruct", 72.7, 327_680)],
)
def test_parameters_and_kv_of_published_models(name, billions, kv_bytes):
    shape = load_shape(name)
    assert shape.num_params / 1e9 == pytest.approx(billions, rel=1e-3)
    assert shape.kv_bytes_per_token(1) == kv_bytes
    assert shape.kv_bytes_per_token(2) == kv_bytes / 2


def test_shapes_from_a_directory_a_mapping_and_an_id(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert load_shape(tmp_path).head_dim == 32  # not hidden / heads
    assert load_shape(CONFIG).num_params == load_shape(tmp_path).num_params
    assert load_shape("Qwen/Qwen3-14B") == load_shape("Qwen3-14B")
    without = {key: value for key, value in CONFIG.items() if key != "vocab_size"}
    experts = {**CONFIG, "model_type": "qwen3_moe", "num_experts": 128}
    for wrong in ("Qwen/Qwen9-900B", experts, {**CONFIG, "model_type": "mamba"}, without):
        with pytest.raises(ModelError):
            load_shape(wrong)


def test_key_value_heads_are_copied_beyond_their_number():
    shape = load_shape("Qwen3-14B")  # 40 heads, 8 of them for keys and values
    assert shape.kv_bytes_per_token(8) * 8 == shape.kv_bytes_per_token(1)
    for tp in (3, 16):  # of 40 heads
        with pytest.raises(ConfigError, match="tp"):
            shape.check_tp(tp)
    assert load_shape("Qwen3-32B").kv_bytes_per_token(16) == load_shape("Qwen3-32B").kv_bytes_per_token(8)


def test_the_shipped_prices_name_known_gpus_sources_and_dates():
    prices = load_prices()
    assert prices.currency == "USD" and set(prices.gpu_hour) <= set(known_gpus())
    for price in (prices.core_hour, *prices.gpu_hour.values()):
        assert price.price > 0 and price.source and isinstance(price.date, date)


def test_a_file_of_the_user_replaces_them(tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text(GOOD)
    prices = load_prices(path)
    assert (prices.currency, prices.core_hour) == ("EUR", None)
    assert prices.of("h100_80g").price == 2.5
    assert prices.of("A100-80G") is None


@pytest.mark.parametrize(("text", "named"), [
    ("gpu_hour: {}\n", "currency"), ("currency: USD\nfoo: 1\n", "foo"),
    ("currency: USD\ncore_hour: {price: -1, source: a, date: 2026-01-31}\n", "core_hour.price"),
    ("currency: USD\ncore_hour: {price: 1, source: a, date: soon}\n", "core_hour.date"), ("currency: [\n", "YAML"),
])  # fmt: skip
def test_a_bad_file_is_one_error_that_names_it(tmp_path, text, named):
    path = tmp_path / "prices.yaml"
    with pytest.raises(ConfigError, match=str(path)):
        load_prices(path)
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        load_prices(path)
