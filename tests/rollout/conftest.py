"""Tiny random models, references computed with plain transformers, and engines that close themselves."""

import asyncio
import itertools

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import factories
from libra.rollout import attention
from libra.rollout.slot_batch import SlotBatch
from libra.rollout.slot_table import Job
from libra.rollout.transformers_engine import TransformersEngine
from libra.rollout.vllm.async_engine import VLLMEngine
from libra.rollout.weight_loading import load_causal_lm
from libra.testing.parts import Models
from libra.types import TurnRequest

VOCAB = 48


SHAPE = {
    "vocab_size": VOCAB, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip


@pytest.fixture(scope="session")
def make_model(tmp_path_factory):
    """``make_model(family, seed)``: a directory with a random two-layer model, made once per session."""
    made = {}

    def make(family="qwen3", seed=0):
        if (family, seed) not in made:
            made[family, seed] = factories.save_model(
                tmp_path_factory.mktemp(f"{family}-{seed}"), family, seed=seed, is_uneven=True, **SHAPE
            )
        return made[family, seed]

    return make


@pytest.fixture(scope="session")
def reference():
    """``reference(directory)``: the same model in plain transformers with its own sdpa attention."""
    loaded = {}

    def load(directory):
        if directory not in loaded:
            loaded[directory] = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa").eval()
        return loaded[directory]

    return load


@pytest.fixture(scope="session")
def reference_logprobs(reference):
    """``reference_logprobs(directory, context, new)``: log-probability of each new token by one full forward pass."""

    def score(directory, context, new, temperature=1.0):
        ids = torch.from_numpy(np.concatenate([context, new]).astype(np.int64))[None]
        with torch.no_grad():
            logits = reference(directory)(ids).logits[0, len(context) - 1 : -1]
        table = torch.log_softmax(logits.float() / temperature, -1)
        return table.gather(1, ids[0, len(context) :, None])[:, 0].numpy()

    return score


@pytest.fixture
def make_engine(make_model):
    """``make_engine(slots=...)``: an engine that is not started; tests start and close it in their own event loop."""

    def make(directory=None, *, slots=8, max_context_tokens=128, **more):
        return TransformersEngine(
            directory or make_model(), slots=slots, max_context_tokens=max_context_tokens, threads=1, **more
        )

    return make


@pytest.fixture(scope="session")
def make_request():
    """``make_request("a", length=9, new=5)``: a request with a random context, the same for the same name."""

    def make(name, *, length=9, new=8, context=None, **fields):
        if context is None:
            rng = np.random.default_rng([ord(letter) for letter in name])
            context = rng.integers(0, VOCAB, length).astype(np.int32)
        return TurnRequest(name, fields.pop("turn", 0), np.asarray(context, np.int32), new, **fields)

    return make


@pytest.fixture(scope="session")
def serve_all():
    """``serve_all(batch, *requests)``: submit to a `SlotBatch`, step until nothing is left; outputs by trajectory."""
    tickets = itertools.count()

    def serve(batch, *requests):
        for request in requests:
            batch.check(request)
            batch.submit(Job(next(tickets), request, 0.0))
        outputs = {}
        while batch.has_work:
            outputs |= {job.request.trajectory_id: output for job, output in batch.step()}
        return outputs

    return serve


@pytest.fixture
def make_batch(make_model):
    """``make_batch(family, slots=...)``: a batch of slots by itself, without an engine's thread."""
    attention.register()

    def make(family="qwen3", *, slots=4, max_context_tokens=96, dtype="float32", **more):
        model = load_causal_lm(make_model(family), dtype, attention.SLOT_ATTENTION)
        return SlotBatch(model, slots=slots, max_context_tokens=max_context_tokens, version=0, **more)

    return make


@pytest.fixture(scope="session")
def vllm_engine(tmp_path_factory):
    """``vllm_engine(body)``: await ``body(engine, models)`` with the session's vLLM engine, whose weights are loaded anew."""
    models = Models(tmp_path_factory.mktemp("vllm"))
    engine = VLLMEngine(models.first, threads=1, slots=16, max_context_tokens=512)

    async def fresh(body):
        await engine.load_version(engine.version + 1, models.first)
        return await body(engine, models)

    with asyncio.Runner() as runner:
        runner.run(engine.start())
        try:
            yield lambda body: runner.run(asyncio.wait_for(fresh(body), 300))
        finally:
            runner.run(engine.close())
