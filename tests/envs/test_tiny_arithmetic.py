"""The model that ships: its files, its tokenizer and template, and the script that makes them."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import libra
from libra.envs import make_environment

MODEL = Path(libra.__file__).parent / "assets" / "tiny_arithmetic"
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"line": "d -> k: * 3", "value": 22}}\n</tool_call>'
END = "<|im_end|>"


@pytest.fixture(scope="module")
def environment():
    return make_environment("tool_arithmetic", {}, 0)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


def rendered(tokenizer, environment, messages, **options):
    return tokenizer.apply_chat_template(messages, tools=environment.tool_schemas, tokenize=False, **options)


def test_it_is_a_small_qwen3_with_its_tokenizer(tokenizer):
    config, generation = (json.loads((MODEL / f"{name}.json").read_text()) for name in ("config", "generation_config"))
    assert config["model_type"] == "qwen3"
    assert (MODEL / "model.safetensors").stat().st_size <= 6_000_000
    assert len(tokenizer) <= config["vocab_size"]
    assert tokenizer.eos_token == END
    assert generation["eos_token_id"] == tokenizer.eos_token_id


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_the_tokenizer(text, tokenizer):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_template_renders_tools_calls_and_responses_as_qwen_does(tokenizer, environment):
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"line": "d -> k: * 3", "value": 22}}}
    messages = [
        {"role": "system", "content": "Be right."}, {"role": "user", "content": "d = 22\nd -> k: * 3"},
        {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "k = 66"},
        {"role": "tool", "content": "again"},
    ]  # fmt: skip
    assert tokenizer.decode(tokenizer.encode(CALL + END), skip_special_tokens=True) == CALL
    assert rendered(tokenizer, environment, messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe right.\nTools: calculator<|im_end|>\n"
        "<|im_start|>user\nd = 22\nd -> k: * 3<|im_end|>\n"
        f"<|im_start|>assistant\n{CALL}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nk = 66\n</tool_response>\n<tool_response>\nagain\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_what_follows_a_turn_does_not_depend_on_what_came_before(tokenizer, environment):
    messages = [*environment.prompt("eval", 3).messages, {"role": "assistant", "content": CALL}]
    longer = [*messages, {"role": "tool", "content": "k = 66"}]
    before = rendered(tokenizer, environment, messages)
    assert rendered(tokenizer, environment, longer).startswith(before)
    assert before.endswith(f"{CALL}{END}\n")
