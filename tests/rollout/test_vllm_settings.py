"""What is decided about a vLLM engine before there is one; none of this needs vLLM."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from libra.errors import EngineError, ModelError, WeightsError
from libra.rollout import vllm_settings
from libra.rollout.vllm_engine import VLLMEngine
from libra.rollout.vllm_settings import CPU_BLOCK_TOKENS, VLLMSettings, environment, kv_bytes, max_model_tokens
from libra.rollout.weight_loading import HEAD, ExpectedWeights

EMBEDDING = "model.embed_tokens.weight"
SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 32}


def settings(**fields) -> VLLMSettings:
    return VLLMSettings(**{"model_dir": Path("m"), "slots": 3, "max_context_tokens": 100} | fields)


@pytest.fixture
def expected(make_model) -> ExpectedWeights:
    return ExpectedWeights.of_directory(make_model("qwen3"), tied=True)


@pytest.fixture
def tensors(make_model) -> dict[str, torch.Tensor]:
    return load_file(make_model("qwen3", seed=1) / "model.safetensors")


def written(directory: Path, tensors) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def test_a_missing_vllm_is_said_with_the_line_to_type(make_model, monkeypatch) -> None:
    monkeypatch.setattr(vllm_settings, "find_spec", lambda name: None)
    engine = VLLMEngine(make_model(), slots=1, max_context_tokens=16)
    with pytest.raises(EngineError, match=r"make setup-vllm.*rollout\.engine=transformers"):
        asyncio.run(engine.start())
    asyncio.run(engine.close())


@pytest.mark.parametrize(
    ("fields", "error"), [({"slots": 0}, EngineError), ({"tp": 0}, EngineError), ({"dtype": "int8"}, ModelError)]
)
def test_impossible_settings_are_refused(fields, error) -> None:
    with pytest.raises(error, match="got"):
        settings(**fields)


@pytest.mark.parametrize("slots", [1, 7])
@pytest.mark.parametrize("context", [31, 100, 1024])
@pytest.mark.parametrize("tp", [1, 2])
def test_every_slot_and_a_probe_have_room_for_their_whole_context(slots, context, tp) -> None:
    given = settings(slots=slots, max_context_tokens=context, tp=tp)
    block_bytes = 2 * 2 * (2 // tp) * 32 * 4 * CPU_BLOCK_TOKENS
    blocks = kv_bytes(SHAPE, given) // block_bytes
    needed = (slots + 1) * -(-(context + 1) // CPU_BLOCK_TOKENS)
    assert needed + 1 < blocks <= needed + slots + 3  # one block is vLLM's own
    assert kv_bytes(SHAPE, settings(slots=slots, max_context_tokens=context, tp=tp, dtype="bfloat16")) * 2 == kv_bytes(
        SHAPE, given
    )


def test_a_context_may_be_as_long_as_the_model_allows() -> None:
    assert max_model_tokens({"max_position_embeddings": 100}, settings()) == 100
    assert max_model_tokens({"max_position_embeddings": 101}, settings()) == 101
    assert max_model_tokens({}, settings()) == 101


def test_the_environment_of_this_process_is_as_before(monkeypatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    before = dict(os.environ)
    with environment(settings(threads=3), on_cpu=True):
        assert os.environ["OMP_NUM_THREADS"] == "3"
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
        os.environ["LD_PRELOAD"] = "libgomp.so"
        del os.environ["OMP_NUM_THREADS"]
    assert dict(os.environ) == before


def test_weights_with_either_name_of_a_tied_head_are_this_models(expected, tensors, tmp_path) -> None:
    assert expected.tied == {HEAD: EMBEDDING}
    assert expected.check(written(tmp_path, tensors)) == tmp_path / "model.safetensors"
    renamed = {HEAD if name == EMBEDDING else name: tensor for name, tensor in tensors.items()}
    expected.check(written(tmp_path, renamed))
    both = tensors | {HEAD: tensors[EMBEDDING].clone()}
    expected.check(written(tmp_path, both))
    both[HEAD][0, 0] += 1
    with pytest.raises(WeightsError, match="differ, but this model ties them"):
        expected.check(written(tmp_path, both))


def test_weights_that_are_not_this_models_are_refused_before_anything_is_read(expected, tensors, tmp_path) -> None:
    missing = {name: tensor for name, tensor in tensors.items() if name != EMBEDDING}
    with pytest.raises(WeightsError, match=rf"1 missing \({EMBEDDING}\), 0 unknown"):
        expected.check(written(tmp_path, missing))
    with pytest.raises(WeightsError, match=r"0 missing \(none\), 1 unknown \(extra\)"):
        expected.check(written(tmp_path, tensors | {"extra": torch.zeros(1)}))
    with pytest.raises(WeightsError, match="1 tensors of another shape"):
        expected.check(written(tmp_path, tensors | {"model.norm.weight": torch.zeros(3)}))


def test_a_torn_file_is_refused(expected, tensors, tmp_path) -> None:
    path = written(tmp_path, tensors) / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 5, 200, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(WeightsError, match="cannot be read as safetensors"):
            expected.check(tmp_path)
    with pytest.raises(WeightsError, match="cannot be read"):
        expected.check(tmp_path / "nowhere")


def test_a_directory_without_safetensors_is_no_model_for_it(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    with pytest.raises(ModelError, match="safetensors"):
        ExpectedWeights.of_directory(tmp_path, tied=False)
