"""TRL's side of ``vs_trl``: a GRPOTrainer that takes steps on command. Runs in TRL's environment.

Commands and answers are JSON, one object a line, on standard input and output::

    -> (start)                                    <- {"ready": {"trl": "1.16.0", "torch": "..."}}
    -> {"steps": 3}                               <- {"steps": [{"step_s": ..., ...}, ...]}
    -> (end of input)                             the process ends

Between commands the process blocks on a read and uses no CPU. A step's seconds run from the moment
it may begin to the moment the next one could. Settings are the best for TRL found on CPU, each
tried against its alternatives: float32 (as Libra), KV cache on, no gradient checkpointing (TRL's
default is on, and slower), one batch, no log lines, no reports, no saving, dropout off, no
reference model.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from typing import Any, TextIO

import even_words as task
import torch
import transformers
import trl
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class CountingTrainer(GRPOTrainer):
    """TRL's trainer, which counts the tokens that it generates."""

    sampled_tokens: int

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        completion_ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        self.sampled_tokens = sum(len(ids) for ids in completion_ids)
        return completion_ids, logprobs


class StepsOnCommand(TrainerCallback):
    """Holds the trainer at the start of a step until a command requests steps."""

    def __init__(self, commands: TextIO, answers: TextIO) -> None:
        self.commands, self.answers = commands, answers
        self.trainer: CountingTrainer | None = None
        self.wanted = 0
        self.done: list[dict[str, float]] = []
        self.began_s: float | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.began_s is not None:
            assert self.trainer is not None
            step_s = time.perf_counter() - self.began_s
            self.done.append({"step_s": step_s, "completion_tokens": self.trainer.sampled_tokens})
            self.wanted -= 1
        if self.wanted == 0:
            self._wait()
        self.began_s = time.perf_counter()

    def _wait(self) -> None:
        if self.done:
            self.say({"steps": self.done})
            self.done = []
        line = self.commands.readline()
        if not line:
            sys.exit(0)
        self.wanted = int(json.loads(line)["steps"])

    def say(self, answer: dict[str, Any]) -> None:
        self.answers.write(json.dumps(answer) + "\n")
        self.answers.flush()


def even_words(completions: list[Any], **_: Any) -> list[float]:
    """The task's reward in TRL's form: one number per completion (a list of one assistant message)."""
    return [task.reward(completion[0]["content"]) for completion in completions]


def make_trainer(options: argparse.Namespace, output_dir: str, callback: StepsOnCommand) -> CountingTrainer:
    config = GRPOConfig(
        output_dir=output_dir, use_cpu=True, seed=options.seed, max_steps=1_000_000,
        per_device_train_batch_size=task.PROMPTS_PER_STEP * task.GROUP_SIZE, gradient_accumulation_steps=1,
        num_generations=task.GROUP_SIZE, num_iterations=1, max_completion_length=task.NEW_TOKENS,
        temperature=task.TEMPERATURE, generation_kwargs={"use_cache": True}, loss_type="dapo", beta=0.0,
        epsilon=task.CLIP_LOW, epsilon_high=task.CLIP_HIGH, scale_rewards="group", disable_dropout=True,
        optim="adamw_torch", learning_rate=task.LEARNING_RATE, lr_scheduler_type="constant", adam_beta1=task.BETAS[0],
        adam_beta2=task.BETAS[1], weight_decay=0.0, max_grad_norm=task.MAX_GRAD_NORM, bf16=False, fp16=False,
        gradient_checkpointing=False, dataloader_num_workers=0, dataloader_pin_memory=False,
        logging_strategy="no", save_strategy="no", eval_strategy="no", report_to="none", disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    prompts = [[{"role": "user", "content": task.question(index)}] for index in range(64 * task.PROMPTS_PER_STEP)]
    trainer = CountingTrainer(
        model=options.model, reward_funcs=even_words, args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}), callbacks=[callback],
    )  # fmt: skip
    trainer.sampled_tokens = 0
    callback.trainer = trainer
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="directory of model and tokenizer")
    parser.add_argument("--threads", type=int, required=True, help="torch threads")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(options.threads)
    callback = StepsOnCommand(sys.stdin, answers)
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = make_trainer(options, output_dir, callback)
        versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
        callback.say({"ready": {**versions, "attention": trainer.model.config._attn_implementation}})
        trainer.train()


if __name__ == "__main__":
    main()
