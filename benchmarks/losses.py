"""Time and memory of chunked log-probabilities under each loss, over the plain formulation with all logits.

Both sides go from hidden states through the output matrix to log-probabilities, the loss of each token, the aggregated loss
and back to the gradients of hidden states and matrix. The plain side is ``log_softmax(hidden @ weight.T)``; ours is
`libra.train.logprobs.chunked_logp`.

``python -m benchmarks.losses --json``; figures ``time_ratio_<loss>`` and ``memory_ratio_<loss>``, ours over plain, lower is better.

The nominal size is 64 sequences x 4,096 tokens x a vocabulary of 32,000, where the plain side holds three buffers of 33.6 GB. Where
they do not fit into ``--memory-gib``, *both* sides run with fewer tokens per sequence (printed): the time ratio hardly depends on
it, and the memory ratio is then an upper bound, since ours grows with N x H and the plain one with N x V. On a GPU of 110 GB or
more ``--device cuda --memory-gib 96`` runs both sides at the nominal size.
``--full`` also runs our side alone at the nominal size.

Peak memory on a CPU is the high-water mark of the resident set of a separate process, less the resident set before the work
(Linux); on a CUDA device it is that of torch's allocator.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import MIN_PAIRS, Figure, alternate, command_parser, emit, status_bytes
from libra.train.logprobs import chunked_logp
from libra.train.losses import cispo_loss, dppo_loss, gmpo_loss, gspo_loss, ppo_loss, reinforce_loss, sapo_loss
from libra.train.sequences import Aggregation, Packed

Loss = Callable[[Tensor, Tensor, Tensor, Packed], Tensor]
LOSSES: dict[str, tuple[Loss, str]] = {
    "ppo": (lambda logp, old, a, _: ppo_loss(logp, old, a), "token-mean"),
    "gspo": (gspo_loss, "seq-mean-token-mean"),
    "cispo": (lambda logp, old, a, _: cispo_loss(logp, old, a), "token-mean"),
    "sapo": (lambda logp, old, a, _: sapo_loss(logp, old, a), "seq-mean-token-mean"),
    "gmpo": (gmpo_loss, "seq-mean-token-mean"),
    "dppo": (lambda logp, old, a, _: dppo_loss(logp, old, a, log_ratio_coef=1e-3), "token-mean"),
    "reinforce": (lambda logp, old, a, _: reinforce_loss(logp, a), "seq-mean-token-sum"),
}
PLAIN_BUFFERS = 3
"""Tensors of N x V on the plain side at once: log-probabilities, their gradient, the gradient of the logits."""


class Work:
    """One forward and backward pass on random inputs of a size."""

    def __init__(self, sequences: int, tokens: int, vocab: int, hidden: int, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        count = sequences * tokens
        self.hidden_NH = torch.randn(count, hidden, generator=generator).to(device).requires_grad_()
        self.weight_VH = (torch.randn(vocab, hidden, generator=generator) / hidden**0.5).to(device).requires_grad_()
        self.target_N = torch.randint(vocab, (count,), generator=generator).to(device)
        self.sequences = Packed(torch.arange(sequences, device=device).repeat_interleave(tokens), sequences)
        self.advantage_N = torch.randn(sequences, generator=generator).to(device).repeat_interleave(tokens)
        self.noise_N = 0.05 * torch.randn(count, generator=generator).to(device)

    def run(self, loss: str, side: str, chunk_tokens: int) -> float:
        """Seconds of one pass."""
        function, mode = LOSSES[loss]
        self.hidden_NH.grad = self.weight_VH.grad = None
        _wait(self.hidden_NH)
        started = time.perf_counter()
        if side == "chunked":
            logp_N, _ = chunked_logp(self.hidden_NH, self.weight_VH, self.target_N, chunk_tokens=chunk_tokens)
        else:
            logp_NV = torch.nn.functional.linear(self.hidden_NH, self.weight_VH).log_softmax(-1)
            logp_N = logp_NV.gather(-1, self.target_N[:, None])[:, 0]
            del logp_NV
        loss_N = function(logp_N, logp_N.detach() + self.noise_N, self.advantage_N, self.sequences)
        Aggregation(mode)(loss_N, self.sequences).backward()
        _wait(self.hidden_NH)
        return time.perf_counter() - started


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def peak_bytes(work: Work, loss: str, side: str, chunk_tokens: int) -> int:
    """Peak memory of one pass; on a CPU it must be the first in this process."""
    if work.hidden_NH.is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work.run(loss, side, chunk_tokens)
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # the mark starts again at what is resident now
    before = status_bytes("VmHWM")
    work.run(loss, side, chunk_tokens)
    return status_bytes("VmHWM") - before


def peak_in_a_process(options: argparse.Namespace, loss: str, side: str, tokens: int) -> tuple[int, float]:
    """Peak bytes and seconds of one pass in a process of its own, which gets the GPU memory that this process has cached."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # at the nominal size 101 GB, and the other process needs as much
    sizes = {
        name: str(getattr(options, name)) for name in ("sequences", "vocab", "hidden", "chunk", "device", "threads")
    }
    command = [sys.executable, "-m", "benchmarks.losses", "--one", loss, side, "--tokens", str(tokens)]
    for name, value in sizes.items():
        command += [f"--{name}", value]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    report = json.loads(done.stdout.splitlines()[-1])
    return report["peak_bytes"], report["seconds"]


def tokens_that_fit(options: argparse.Namespace) -> int:
    """Tokens per sequence for which the plain side fits into ``--memory-gib``, halved from the nominal number."""
    tokens = options.tokens
    while tokens > 1 and PLAIN_BUFFERS * 4 * options.sequences * tokens * options.vocab > options.memory_gib * 2**30:
        tokens //= 2
    return int(tokens)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = command_parser("losses", __doc__, pairs=MIN_PAIRS)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4096, help="per sequence")
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--chunk", type=int, default=1024, help="tokens per chunk")
    parser.add_argument("--losses", nargs="+", choices=list(LOSSES), default=list(LOSSES))
    parser.add_argument("--memory-gib", type=float, default=4.0, help="limit of the plain side")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--full", action="store_true", help="also run our side alone at the nominal size")
    parser.add_argument("--one", nargs=2, metavar=("LOSS", "SIDE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.one:
        work = Work(options.sequences, options.tokens, options.vocab, options.hidden, options.device)
        started = time.perf_counter()
        peak = peak_bytes(work, *options.one, options.chunk)
        print(json.dumps({"peak_bytes": peak, "seconds": time.perf_counter() - started}))
        return
    tokens = tokens_that_fit(options)
    print(f"both sides: {options.sequences} x {tokens} tokens x {options.vocab}, hidden {options.hidden}, float32")
    if tokens != options.tokens:
        print(
            f"scaled down from {options.tokens} tokens per sequence: the plain side may take {options.memory_gib} GiB"
        )
    figures: dict[str, Figure] = {}
    work = Work(options.sequences, tokens, options.vocab, options.hidden, options.device)
    for loss in options.losses:
        for side in ("chunked", "plain"):
            work.run(loss, side, options.chunk)  # the first pass allocates
        pairs = alternate(
            lambda loss=loss: work.run(loss, "chunked", options.chunk),
            lambda loss=loss: work.run(loss, "plain", options.chunk),
            pairs=options.pairs,
        )
        ours, plain = (peak_in_a_process(options, loss, side, tokens)[0] for side in ("chunked", "plain"))
        print(
            f"{loss}: {pairs.medians[0]:.3f} s, {ours / 2**20:.0f} MiB; plain {pairs.medians[1]:.3f} s, {plain / 2**20:.0f} MiB"
        )
        figures[f"time_ratio_{loss}"] = Figure(pairs.ratio, "ratio", "lower")
        figures[f"memory_ratio_{loss}"] = Figure(ours / plain, "ratio", "lower")
    figures["tokens_per_sequence"] = Figure(tokens, "tokens", "higher")
    if options.full:
        peak, seconds = peak_in_a_process(options, options.losses[0], "chunked", options.tokens)
        figures["chunked_full_memory"] = Figure(peak / 2**20, "MiB", "lower")
        figures["chunked_full_time"] = Figure(seconds, "s", "lower")
    emit("losses", figures, arguments=arguments, as_json=options.json)


if __name__ == "__main__":
    main()
