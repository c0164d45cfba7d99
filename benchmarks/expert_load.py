"""Load of experts per micro-batch, packed by length and by `trainer.balance_experts`, with and without shared prompts.

A random Qwen3-MoE (2 layers, 8 experts, 2 per token) answers prompts of two letters each: 32 prompts of 24 to 112 tokens, 8 samples
of two turns with up to 32 tokens of answer, of different lengths. The routes of all tokens are what its routers choose.

Figures, for micro-batches of ``--tokens``: by how much the largest load over the mean (mean over micro-batches) falls, by how much
the tokens through the busiest experts fall in all, and the bound of that: no assignment has fewer of them than the whole batch at
once, with each prompt once, for the largest of a sum is at most the sum of the largest. ``seconds`` are of CPU.

Shape legend: T tokens, L layers, K experts per token.

``python -m benchmarks.expert_load [--tokens 512 1024 2048] --json``
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.report import Figure, command_parser, emit
from libra.experts import Routers
from libra.train.expert_balance import load_ratio, loads_of
from libra.train.samples import Sample
from libra.train.sequence_packing import pack

EXPERTS, LAYERS, TOP_K = 8, 2, 2
PROMPTS, GROUP, TURN_TOKENS, OBSERVED = 32, 8, 16, 4
ROW_TOKENS = 512


def samples() -> list[Sample]:
    """All samples with their routes (T, L, K)."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=259, hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        max_position_embeddings=1024, tie_word_embeddings=True, intermediate_size=64, moe_intermediate_size=32,
        num_experts=EXPERTS, num_experts_per_tok=TOP_K, norm_topk_prob=True, decoder_sparse_step=1, initializer_range=0.1,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).eval()
    routers = Routers(model, listen=True)
    made = []
    for prompt in range(PROMPTS):
        rng = np.random.default_rng(prompt)
        letters = rng.integers(0, 256, 2)
        ids = np.tile(rng.choice(letters, 24 + 8 * (prompt % 12)), (GROUP, 1))
        begins = [ids.shape[1]]
        generator = torch.Generator().manual_seed(prompt)
        for _ in range(TURN_TOKENS):
            ids = _with_token(model, ids, generator)
        ids = np.concatenate([ids, rng.choice(letters, (GROUP, OBSERVED))], 1)
        begins.append(ids.shape[1])
        for _ in range(TURN_TOKENS):
            ids = _with_token(model, ids, generator)
        with torch.no_grad():
            model(input_ids=torch.from_numpy(ids[:, :-1]))
        routes = routers.take().numpy().reshape(GROUP, -1, LAYERS, TOP_K).astype(np.int16)
        actions = np.concatenate([np.arange(begin, begin + TURN_TOKENS) for begin in begins])
        for sample in range(GROUP):
            own = actions[: rng.integers(4, len(actions) + 1)]
            logp, current = np.zeros(len(own), np.float32), np.ones(len(own), np.bool_)
            made.append(
                Sample(
                    ids[sample, : own[-1]],
                    own - 1,
                    ids[sample, own],
                    logp,
                    current,
                    1.0,
                    routes=routes[sample, : own[-1]],
                )
            )
    return made


@torch.no_grad()
def _with_token(model: torch.nn.Module, ids: np.ndarray, generator: torch.Generator) -> np.ndarray:
    logits = model(input_ids=torch.from_numpy(ids)).logits[:, -1]
    return np.concatenate([ids, torch.multinomial(torch.softmax(logits, -1), 1, generator=generator).numpy()], 1)


@dataclass(frozen=True, slots=True)
class Packing:
    """What one way of packing makes: ``ratio`` is the mean over micro-batches of largest over mean load, ``busiest`` the tokens
    through the busiest expert of each (mean over layers, summed), ``least`` those of the whole batch at once."""

    micro_batches: int
    tokens: int
    ratio: float
    busiest: float
    least: float
    seconds: float


def packed(batch: Sequence[Sample], tokens: int, *, share: bool, even: bool) -> Packing:
    """One way of packing ``batch``."""
    began = time.process_time()
    made = pack(
        batch,
        max_row_tokens=min(ROW_TOKENS, tokens),
        micro_batch_tokens=tokens,
        share_prompts=share,
        num_experts=EXPERTS if even else 0,
    )
    seconds = time.process_time() - began
    loads = [loads_of([micro.routes_PLK.numpy()], EXPERTS) for micro in made if micro.routes_PLK is not None]
    return Packing(
        len(made),
        sum(micro.num_tokens for micro in made),
        float(np.mean([load_ratio(each, EXPERTS) for each in loads])),
        float(sum(_busiest(each) for each in loads)),
        _busiest(np.concatenate(loads)),
        seconds,
    )


def _busiest(loads_SD: np.ndarray) -> float:
    return float(loads_SD.sum(0).reshape(LAYERS, EXPERTS).max(1).mean())


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all sizes of micro-batches and print the figures."""
    parser = command_parser("expert_load", __doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048], help="of a micro-batch")
    options = parser.parse_args(arguments)
    batch, figures = samples(), dict[str, Figure]()
    for tokens in options.tokens:
        for share in (False, True):
            given, even = (packed(batch, tokens, share=share, even=way) for way in (False, True))
            name = f"{'shared' if share else 'own'}_{tokens}"
            print(f"{name}: {given} -> {even}", flush=True)
            figures |= {
                f"{name}_ratio_cut": Figure(1 - even.ratio / given.ratio, "share", "higher", 0.2),
                f"{name}_busiest_cut": Figure(1 - even.busiest / given.busiest, "share", "higher"),
                f"{name}_busiest_cut_bound": Figure(1 - given.least / given.busiest, "share", "higher"),
                f"{name}_tokens": Figure(even.tokens / given.tokens, "ratio", "lower"),
            }
    emit("expert_load", figures, arguments=arguments, as_json=options.json)


if __name__ == "__main__":
    main()
