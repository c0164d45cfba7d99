"""A tokenizer that splits by merges, and a template that shows the reasoning of the last turn only, as Qwen3's does."""

import pytest
from coroutine_tests import pytest_pyfunc_call  # noqa: F401

TEMPLATE = """{% if tools %}<|im_start|>system
{% if messages[0].role=='system' %}{{ messages[0].content }}
{% endif %}Tools:{% for t in tools %}
{{ t | tojson }}{% endfor %}<|im_end|>
{% endif %}{% set ns=namespace(last=-1) %}{% for m in messages %}{% if m.role=='user' %}{% set ns.last=loop.index0 %}
{%- endif %}{% endfor %}{% for m in messages %}{% if m.role=='system' and not (loop.first and tools) %}<|im_start|>system
{{ m.content }}<|im_end|>
{% elif m.role=='user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role=='assistant' %}<|im_start|>assistant
{% if m.reasoning_content and loop.index0 > ns.last %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role=='tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="session")
def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>", "<pad>"]
    made.train_from_iterator(
        ["the answer is the thinking of a tool call with the name and the arguments " * 4, TEMPLATE, "user assistant"],
        trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<pad>")
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture(scope="session")
def conversation_format(tokenizer):
    from libra.rollout.chat_format import ChatFormat
    from libra.rollout.conversation_format import ConversationFormat

    return ConversationFormat(ChatFormat(tokenizer))


@pytest.fixture(scope="session")
def odd_ids(tokenizer):
    """Token ids of a text as a sampler may write them and no encoder does: split at random places."""
    import random

    def split(text, seed):
        draw, ids, at = random.Random(seed), [], 0
        while at < len(text):
            size = draw.choice([1, 2, 3, 7])
            ids += tokenizer.encode(text[at : at + size], add_special_tokens=False)
            at += size
        return ids

    return split
