"""What all tests share: one thread per process, no network, the same Hypothesis examples on every machine.

Tests of the driver, the graph and the workers share a tiny random model and one local cluster. Their fixtures import torch and
Dask when they are first used, so that other tests begin at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from distributed import Client, Scheduler

    from libra.config import RunConfig

for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(_name, _value)

# A shell starts background jobs with Ctrl-C ignored, and processes of tests that are ended by it would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: the machine is shared. Derandomised: a red build is the change's doing, not the day's.
settings.register_profile("libra", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("libra")


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the repository."""
    return Path(__file__).resolve().parent.parent


TEMPLATE = (
    "{%- for m in messages %}{{'<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n'}}{%- endfor %}"
    "{%- if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{%- endif %}"
)


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random two-layer Qwen3, a byte tokenizer and a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    directory = tmp_path_factory.mktemp("random_model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=fast.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=fast.convert_tokens_to_ids("<|endoftext|>"),
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def random_moe(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random mixture of experts (Qwen3-MoE, two layers, two of eight experts) with the tokenizer of `random_model`."""
    import shutil

    import torch
    from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    directory = tmp_path_factory.mktemp("random_moe") / "model"
    shutil.copytree(random_model, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    dense = AutoConfig.from_pretrained(random_model).to_dict()
    shared = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    shared += ("max_position_embeddings", "tie_word_embeddings", "eos_token_id", "pad_token_id")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **{name: dense[name] for name in shared}, intermediate_size=64, moe_intermediate_size=32, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1, initializer_range=0.1,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def cluster_client() -> Iterator[Client]:
    """A client of three worker processes: rollout-0, tool-0, train-0."""
    from distributed import Client

    from libra.cluster.local import local_cluster
    from libra.config import config_from_dict

    config = config_from_dict({"cluster": {"dashboard_port": 0, "threads": 1}, "rollout": {"slots": 8}})
    with local_cluster(config) as cluster, Client(cluster) as client:
        yield client


@pytest.fixture
def make_config(random_model: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """A small run's configuration; arguments are sections, laid over the defaults of this fixture."""
    from libra.config import config_from_dict

    def make(**sections: dict[str, Any]) -> RunConfig:
        values: dict[str, dict[str, Any]] = {
            "run": {"name": "demo", "dir": str(tmp_path), "iterations": 2},
            "model": {"path": str(random_model)},
            "environment": {"name": "libra.testing:FixedTurns"},
            "rollout": {"max_new_tokens": 4, "max_turns": 3, "ignore_eos": True, "slots": 8},
            "trainer": {"prompts": 2, "group_size": 2, "lr": 1e-3},
            "cluster": {"threads": 1, "dashboard_port": 0},
            "observe": {"progress": False, "tensorboard": False},
        }
        for section, changes in sections.items():
            values.setdefault(section, {}).update(changes)
        return config_from_dict(values)

    return make


@pytest.fixture(scope="session")
def until() -> Callable[[Any, Callable[[Scheduler], bool]], None]:
    """``until(cluster, condition)``: wait until the condition is true of the scheduler of a cluster in this process."""
    from distributed.diagnostics.plugin import SchedulerPlugin

    class Notices(SchedulerPlugin):
        """Sets an event whenever a task, a worker or a report moves something in the scheduler, after
        Libra's plugins have seen it."""

        name = "test-notices"

        def __init__(self) -> None:
            self.news = asyncio.Event()

        def transition(self, *args: Any, **kwargs: Any) -> None:
            self.news.set()

        def log_event(self, topic: str, msg: Any) -> None:
            self.news.set()

        def add_worker(self, scheduler: Scheduler, worker: str) -> None:
            self.news.set()

        def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
            self.news.set()

    def wait(cluster: Any, condition: Callable[[Scheduler], bool]) -> None:
        async def look() -> None:
            scheduler, notices = cluster.scheduler, Notices()
            scheduler.add_plugin(notices, idempotent=False)
            try:
                while not condition(scheduler):
                    notices.news.clear()
                    await notices.news.wait()
            finally:
                scheduler.remove_plugin(notices.name)

        cluster.sync(look)

    return wait
