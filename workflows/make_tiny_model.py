"""Makes the tiny model that ships, ``libra/assets/tiny_arithmetic``, from nothing but its seed.

    python workflows/make_tiny_model.py --out libra/assets/tiny_arithmetic

A Qwen3 model of half a million parameters learns by supervision to use the calculator of ``tool_arithmetic``, on
questions of **1 to 3 operations only**, in three phases, some four minutes on one core:

1. *copies*: lines in two orders, nothing worked out. It forms the look-up "what follows this name?".
2. *skill*: flawless demonstrations, with up to 5 lines in the question that its answer does not need.
3. *habits*: an imperfect demonstrator (`HABITS`) that stops early, guesses, calls with a wrong operand, writes malformed
   JSON, and gives up after a time-out, so that reinforcement learning has something to unlearn, also on the 4 to 8
   operations that supervision never showed.

What lets it go on to longer chains: every step is one look-up by name, and the position ids are stretched by random gaps
at the ends of messages, so no distance is tied to a step's number.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import re
import time
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import jinja2
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AddedToken, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from libra.envs import run_action
from libra.envs.tool_arithmetic import ANSWER, LIMIT, NAMES, ToolArithmetic, calculate

MAX_OPERATIONS = 3
SPARE_LINES = 5
VOCABULARY = 640
PIECES = r" -> (?:ans|[a-z])(?![a-z])|: [-+*] [0-9]|[0-9]|(?<![A-Za-z])(?:ans|[A-Za-z])(?![A-Za-z])"
"""What never merges with its neighbours: " -> d" and ": + 5" are one token each, so the line after a name is found by one
look-up per token; digits stay single."""
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# Share of steps at which the demonstrator does each wrong thing instead of the right call.
HABITS = {
    "stop_early": 0.07,  # answers with the result it has
    "guess": 0.04,  # answers with a number of its own
    "wrong_call": 0.07,  # calls with another operator or operand
    "malformed": 0.05,  # writes a call that is no call, then tries again
    "give_up": 0.50,  # of time-outs and overflows: answers instead of trying again
}
HANG_SHARE = 0.06  # of calls, so that retrying is seen often enough to be learnt

# Tool schemas are rendered as names only: a model of this size has seen the one tool it knows, and a schema would be
# most of its context.
CHAT_TEMPLATE = """\
{%- macro calls(message) %}
{%- for call in message.tool_calls %}
{%- set call = call.function if call.function is defined else call %}
{{- ('' if loop.first and not message.content else '\\n') + '<tool_call>\\n{"name": "' + call.name }}
{{- '", "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{%- endmacro %}
{%- if messages[0].role == 'system' or tools %}
{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else '') }}
{%- if tools %}
{{- '\\nTools:' }}
{%- for tool in tools %}{{ ' ' + (tool.function if tool.function is defined else tool).name }}{% endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- if message.tool_calls %}{{ calls(message) }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"line": "%s", "value": %s}}\n</tool_call>'
MALFORMED = (
    '<tool_call>\n{"name": "calculator", "line": "%s", "value": %s}\n</tool_call>',
    '<tool_call>\n{"name": "calculator", "arguments": {"line": "%s", "value": %s\n</tool_call>',
    '<tool_call>\n{"name": "calculate", "arguments": {"line": "%s", "value": %s}}\n</tool_call>',
)


class Demonstrator:
    """Writes conversations about ``tool_arithmetic`` with some bad habits; what tools say is what they really say.

    ``hang_share`` of the calls time out. A question shows up to 5 lines that its answer does not need.
    """

    def __init__(self, seed: int, habits: dict[str, float], hang_share: float) -> None:
        self.habits, self.hang_share = habits, hang_share
        self.environment = ToolArithmetic(
            seed=seed, max_operations=MAX_OPERATIONS, spare_lines=SPARE_LINES, timeout_rate=0.0
        )
        self.random = random.Random(f"demonstrator/{seed}")
        self.said = asyncio.run(_failures(seed))

    def conversation(self, index: int) -> list[dict[str, str]]:
        """Messages of one demonstration on training question ``index``."""
        messages = [dict(message) for message in self.environment.prompt("train", index).messages]
        start, *lines = messages[-1]["content"].splitlines()
        name, number = start.split(" = ")
        value, line_of = int(number), {line.split(" ")[0]: line for line in lines}
        while name != ANSWER:
            if self._does("stop_early"):
                break
            if self._does("guess"):
                value = self.random.randint(0, LIMIT)
                break
            result = self._step(messages, line_of[name], value)
            if result is None:
                break
            name, value = result
        return [*messages, {"role": "assistant", "content": str(value)}]

    def _step(self, messages: list[dict[str, str]], line: str, value: int) -> tuple[str, int] | None:
        """Works out ``line`` by calls; name and value of its result, or None where the demonstrator gives up."""
        while True:
            if self._does("malformed"):
                text = self.random.choice(MALFORMED)
                self._exchange(messages, text % (line, value), self.said[text])
                continue
            call = self._wrong(line, value) if self._does("wrong_call") else (line, value)
            if self.random.random() < self.hang_share:
                self._exchange(messages, CALL % call, self.said["hang"])
            else:
                try:
                    said = calculate(*call)
                    self._exchange(messages, CALL % call, said)
                    name, result = said.split(" = ")
                    return name, int(result)
                except OverflowError as error:
                    self._exchange(messages, CALL % call, f"OverflowError: {error}")
            if self._does("give_up"):
                return None

    def _wrong(self, line: str, value: int) -> tuple[str, int]:
        """The call with another operation, or with one digit of the value replaced."""
        if self.random.random() < 0.5:
            return f"{line[:-3]}{self.random.choice('+-*')} {self.random.randint(2, 9)}", value
        digits = list(str(value))
        digits[self.random.randrange(len(digits))] = str(self.random.randint(1, 9))
        return line, int("".join(digits))

    def _does(self, habit: str) -> bool:
        return self.random.random() < self.habits.get(habit, 0.0)

    def _exchange(self, messages: list[dict[str, str]], text: str, returned: str) -> None:
        messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": returned}]


async def _failures(seed: int) -> dict[str, str]:
    """What the environment says to each malformed call and to one that hangs, by running them."""
    environment = ToolArithmetic(seed=seed, timeout_rate=0.999999, timeout_s=0.2)
    prompt = environment.prompt("train", 0)
    example = ("k -> d: + 5", 17)
    said = {}
    for name, text in [*((text, text % example) for text in MALFORMED), ("hang", CALL % example)]:
        (call,) = environment.parse(text)
        said[name] = (await run_action(environment, prompt, call, action_id="make-tiny-model")).content
    return said


def make_tokenizer(
    conversations: list[list[dict[str, str]]], schemas: list[dict], pieces: str = PIECES, vocabulary: int = VOCABULARY
) -> PreTrainedTokenizerFast:
    """Byte-level BPE learnt on demonstrations; fixed scaffolding becomes few tokens."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(CONTROL) - len(MARKUP),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    markup = re.compile("|".join(re.escape(token) for token in CONTROL + MARKUP))
    rendered = (_render(messages, schemas) for messages in conversations)
    tokenizer.train_from_iterator((piece for text in rendered for piece in markup.split(text) if piece), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKUP])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def _render(messages: list[dict[str, str]], schemas: list[dict]) -> str:
    return _template().render(messages=messages, tools=schemas)


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    return jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(CHAT_TEMPLATE)


def make_model(tokenizer: PreTrainedTokenizerFast, hidden: int, layers: int) -> Qwen3ForCausalLM:
    """An untrained Qwen3 with tied embeddings."""
    end, pad = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=-(-len(tokenizer) // 64) * 64,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 32,
            num_key_value_heads=hidden // 64,
            head_dim=32,
            max_position_embeddings=1024,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            initializer_range=0.06,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=pad,
            dtype="float32",
        )
    )


class Examples:
    """Tokenised demonstrations: ids, which ids the assistant wrote, and where messages end."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, demonstrator: Demonstrator, count: int) -> None:
        start = tokenizer.convert_tokens_to_ids("<|im_start|>")
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        (role,) = tokenizer.encode("assistant\n", add_special_tokens=False)
        schemas = demonstrator.environment.tool_schemas
        self.pad = tokenizer.pad_token_id
        self.rows: list[tuple[list[int], list[bool], list[bool]]] = []
        texts = [_render(demonstrator.conversation(index), schemas) for index in range(count)]
        for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
            wrote, breaks, writing, messages = [], [], False, 0
            for place, token in enumerate(ids):
                messages += token == start
                wrote.append(writing)
                breaks.append(token == end)
                if token == role and ids[place - 1] == start:
                    writing = True
                elif token == end:
                    writing = False
            self.rows.append((ids, wrote, breaks))

    def batch(self, chosen: list[int], generator: torch.Generator, stretch: int) -> dict[str, torch.Tensor]:
        """Input ids, labels (-100 where the assistant did not write) and position ids (B, T) of the ``chosen`` rows.

        Most rows have their position ids stretched by up to ``stretch`` at the end of each message.
        """
        rows = [self.rows[i] for i in chosen]
        width = max(len(ids) for ids, _, _ in rows)
        input_BT = torch.full((len(rows), width), self.pad)
        labels_BT = torch.full((len(rows), width), -100)
        gaps_BT = torch.ones((len(rows), width), dtype=torch.long)
        for row, (ids, wrote, breaks) in enumerate(rows):
            ids_T = torch.tensor(ids)
            input_BT[row, : len(ids)] = ids_T
            labels_BT[row, : len(ids)] = torch.where(torch.tensor(wrote), ids_T, -100)
            if torch.rand((), generator=generator) < 0.8:
                extra_T = torch.randint(0, stretch, (len(ids),), generator=generator)
                gaps_BT[row, : len(ids)] += extra_T * torch.tensor(breaks)
        # Without a mask, transformers takes a jump in position ids for the start of another sequence, and hides what was
        # before it. Padding is on the right and never a label, so ones are enough.
        mask_BT = torch.ones_like(input_BT)
        positions_BT = gaps_BT.cumsum(1) - 1
        return {"input_ids": input_BT, "attention_mask": mask_BT, "labels": labels_BT, "position_ids": positions_BT}


class Copies(Examples):
    """The lines of a question, and the same lines in another order: what follows a name has to be looked up.

    Nothing is worked out here, so no operation is seen. It forms the look-up that every step of a question needs.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, count: int) -> None:
        self.pad = tokenizer.pad_token_id
        self.rows = []
        generator = random.Random(f"copies/{seed}")
        texts = []
        for _ in range(count):
            names = [*generator.sample(NAMES, generator.randint(4, 9)), ANSWER]
            lines = [f"{a} -> {b}: {generator.choice('+-*')} {generator.randint(2, 9)}" for a, b in pairwise(names)]
            texts.append("".join("\n" + line for _ in range(2) for line in generator.sample(lines, len(lines))))
        for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
            half = len(ids) // 2
            wrote = [place > half and (place - half) % 4 >= 2 for place in range(len(ids))]
            self.rows.append((ids, wrote, [place == half for place in range(len(ids))]))


def train(
    model: Qwen3ForCausalLM, examples: Examples, steps: int, batch: int, lr: float, stretch: int, seed: int
) -> None:
    """Adam with a short warm-up and a cosine to a tenth; the loss is over what the assistant wrote."""
    generator = torch.Generator().manual_seed(seed)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=3 * lr, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / 50) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        )
        for optimizer in optimizers
    ]
    # Rows of like length together: padding costs as much as tokens.
    order = sorted(range(len(examples.rows)), key=lambda i: len(examples.rows[i][0]))
    started_s = time.perf_counter()
    for step in range(steps):
        place = int(torch.randint(0, max(len(order) - batch, 1), (), generator=generator))
        given = examples.batch(order[place : place + batch], generator, stretch)
        labels_BT = given.pop("labels")
        logits_BTV = model(**given).logits
        loss = torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in (*optimizers, *schedules):
            part.step()
        if (step + 1) % 50 == 0:
            print(
                f"step {step + 1}/{steps}  loss {loss.item():.4f}  {time.perf_counter() - started_s:.0f} s", flush=True
            )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("libra/assets/tiny_arithmetic"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--copy-steps", type=int, default=500, help="optimizer steps on copying lines")
    parser.add_argument("--skill-steps", type=int, default=600, help="optimizer steps on flawless demonstrations")
    parser.add_argument(
        "--habit-steps", type=int, default=120, help="optimizer steps on demonstrations with bad habits"
    )
    parser.add_argument("--batch", type=int, default=32, help="demonstrations per step")
    parser.add_argument("--layers", type=int, default=3)
    chosen = parser.parse_args()
    torch.manual_seed(chosen.seed)
    torch.set_num_threads(1)  # sums in another order give other weights
    flawless = Demonstrator(chosen.seed, {}, hang_share=0.15)
    imperfect = Demonstrator(chosen.seed + 1, HABITS, hang_share=0.06)
    conversations = [imperfect.conversation(index) for index in range(3000)]
    tokenizer = make_tokenizer(conversations, flawless.environment.tool_schemas)
    model = make_model(tokenizer, hidden=128, layers=chosen.layers)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(tokenizer)} tokens, {parameters} parameters; supervision on 1-{MAX_OPERATIONS} operations only")
    copies = Copies(tokenizer, chosen.seed, 20_000)
    print(f"copies: {chosen.copy_steps} steps of {2 * chosen.batch}", flush=True)
    train(model, copies, chosen.copy_steps, 2 * chosen.batch, 2e-3, stretch=300, seed=chosen.seed)
    for what, demonstrator, steps, lr in (
        ("skill", flawless, chosen.skill_steps, 2e-3),
        ("habits", imperfect, chosen.habit_steps, 5e-4),
    ):
        examples = Examples(tokenizer, demonstrator, min(30_000, steps * chosen.batch))
        print(f"{what}: {steps} steps of {chosen.batch} from {len(examples.rows)} demonstrations", flush=True)
        train(model, examples, steps, chosen.batch, lr, stretch=64, seed=chosen.seed)
        save(model, tokenizer, chosen.out if what == "habits" else Path(f"{chosen.out}_{what}"))


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write model and tokenizer in Hugging Face layout."""
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        max_new_tokens=32,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    print(f"wrote {directory}: {', '.join(sorted(path.name for path in directory.iterdir()))}")


if __name__ == "__main__":
    main()
