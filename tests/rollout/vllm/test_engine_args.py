"""What is decided about a vLLM engine before there is one; none of this needs vLLM."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from libra.config.sections import vllm_is_installed
from libra.errors import EngineError, ModelError
from libra.rollout.vllm.async_engine import VLLMEngine
from libra.rollout.vllm.engine_args import (
    CPU_BLOCK_TOKENS,
    VLLMSettings,
    engine_args,
    environment,
    kv_bytes,
    max_model_tokens,
)
from libra.rollout.weight_loading import ExpectedWeights

SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 32}


def settings(**fields):
    return VLLMSettings(**{"model_dir": Path("m"), "slots": 3, "max_context_tokens": 100} | fields)


def test_a_missing_vllm_is_said_with_the_line_to_type(make_model, monkeypatch):
    monkeypatch.setattr("libra.config.sections.find_spec", lambda name: None)
    engine = VLLMEngine(make_model(), slots=1, max_context_tokens=16)
    with pytest.raises(EngineError, match="make setup-vllm"):
        asyncio.run(engine.start())
    asyncio.run(engine.close())


def test_impossible_settings_are_refused():
    for fields, error in (({"slots": 0}, EngineError), ({"tp": 0}, EngineError), ({"dtype": "int8"}, ModelError)):
        with pytest.raises(error):
            settings(**fields)


@pytest.mark.parametrize("slots", [1, 7])
@pytest.mark.parametrize("context", [31, 1024])
@pytest.mark.parametrize("tp", [1, 2])
def test_every_slot_and_a_probe_have_room_for_their_whole_context(slots, context, tp):
    given = settings(slots=slots, max_context_tokens=context, tp=tp)
    block_bytes = 2 * 2 * (2 // tp) * 32 * 4 * CPU_BLOCK_TOKENS
    blocks = kv_bytes(SHAPE, given) // block_bytes
    needed = (slots + 1) * -(-(context + 1) // CPU_BLOCK_TOKENS)
    assert needed + 1 < blocks <= needed + slots + 3  # one block is vLLM's own
    assert max_model_tokens({"max_position_embeddings": 100}, settings()) == 100
    narrow = settings(slots=slots, max_context_tokens=context, tp=tp, dtype="bfloat16")
    assert kv_bytes(SHAPE, narrow) * 2 == kv_bytes(SHAPE, given)


def test_the_environment_of_this_process_is_as_before(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    before = dict(os.environ)
    with environment(settings(threads=3), on_cpu=True):
        assert os.environ["OMP_NUM_THREADS"] == "3"
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
        os.environ["LD_PRELOAD"] = "libgomp.so"
        del os.environ["OMP_NUM_THREADS"]
    assert dict(os.environ) == before


@pytest.mark.vllm
@pytest.mark.skipif(not vllm_is_installed(), reason="vllm is not installed here: make setup-vllm")
def test_a_connector_that_keeps_stale_kv_and_drafts_on_a_cpu_are_refused(make_model):
    for field, value in (
        ("kv_transfer_config", {"kv_connector": "ExampleConnector"}),
        ("speculative_config", {"method": "ngram", "num_speculative_tokens": 2}),
    ):
        with pytest.raises(ModelError, match=field):
            engine_args(settings(model_dir=make_model(), engine_args={field: value}), on_cpu=True)
    made = settings(model_dir=make_model(), engine_args={"kv_transfer_config": {"kv_connector": "OffloadingConnector"}})
    assert engine_args(made, on_cpu=False).kv_transfer_config.kv_connector == "OffloadingConnector"


def test_a_directory_without_safetensors_is_no_model_for_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    with pytest.raises(ModelError, match="safetensors"):
        ExpectedWeights.of_directory(tmp_path, tied=False)
