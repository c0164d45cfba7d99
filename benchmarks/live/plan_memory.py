"""Peak memory of a training step, predicted by the planner's cost model and measured in processes
of their own.

``worst_relative_error`` over all cells. A cell is a random Qwen3 of 40 to 110 million parameters, a
batch of random tokens, and a layout. Each process first trains a tiny model of the same layout: the
resident memory then is the baseline. Measured is the high-water mark of the second step, less the
baseline.

The cost model has no fitted constants. Cells 0 and 3, and a profile of the 41M model under fsdp2,
were seen while it was written.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Figure, command_parser, emit

GOAL = 0.10
STEPS = 2
TINY = {"vocab": 64, "hidden": 32, "ffn": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
MODELS: dict[str, dict[str, int]] = {
    "41M": {"vocab": 32_000, "hidden": 512, "ffn": 1536, "layers": 8, "heads": 8, "kv_heads": 4, "head_dim": 64},
    "57M": {"vocab": 64_000, "hidden": 512, "ffn": 1408, "layers": 8, "heads": 8, "kv_heads": 2, "head_dim": 64},
    "102M": {"vocab": 151_936, "hidden": 512, "ffn": 1536, "layers": 7, "heads": 8, "kv_heads": 8, "head_dim": 64},
    "78M untied": {
        "vocab": 32_000, "hidden": 640, "ffn": 1792, "layers": 8, "heads": 10, "kv_heads": 5, "head_dim": 64,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement."""

    model: str
    layout: str
    checkpointing: bool
    tokens: int = 1024
    sequences: int = 4
    micro_batch_tokens: int = 2048
    max_row_tokens: int = 1
    logit_chunk_tokens: int = 512
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.layout}{'_checkpointing' if self.checkpointing else ''}"

    @property
    def processes(self) -> int:
        return 1 if self.layout == "alone" else 2


def cells() -> list[Cell]:
    each = [
        Cell(model, layout, checkpointing)
        for model, layout in (("41M", "ddp"), ("57M", "fsdp2"), ("102M", "alone"))
        for checkpointing in (False, True)
    ]
    return [
        *each,
        Cell("78M untied", "fsdp2", True, tokens=1536, micro_batch_tokens=1536),
        Cell("102M", "ddp", True, tokens=700, micro_batch_tokens=2100, sequences=6, logit_chunk_tokens=128),
        Cell("41M", "alone", False, tokens=500, max_row_tokens=1024, sequences=4, settings=(("entropy_coef", 0.01),)),
        Cell("57M", "alone", True, tokens=2048, sequences=2, settings=(("kl_coef", 0.1),)),
    ]


def predicted_bytes(cell: Cell) -> float:
    from libra.hardware.shapes import shape_from_config
    from libra.planner.cost.training_cost import Layout, memory_parts_bytes

    given = dict(cell.settings)
    layout = Layout(
        kind="fsdp2" if cell.layout == "fsdp2" else "ddp", gradient_checkpointing=cell.checkpointing,
        micro_batch_tokens=cell.micro_batch_tokens, max_row_tokens=cell.max_row_tokens, generated_frac=7 / 8,
        logit_chunk_tokens=cell.logit_chunk_tokens, reference=given.get("kl_coef", 0) > 0,
        entropy_bonus=given.get("entropy_coef", 0) > 0, weight_bytes=4, master_bytes=None, on_cpu=True,
        runtime_bytes=0.0,
    )  # fmt: skip
    shape = shape_from_config(_config(MODELS[cell.model], tied=not cell.model.endswith("untied")).to_dict(), cell.model)
    return sum(memory_parts_bytes(shape, np.full(cell.sequences, float(cell.tokens)), cell.processes, layout).values())


def _config(sizes: dict[str, int], tied: bool = True) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=sizes["vocab"], hidden_size=sizes["hidden"], intermediate_size=sizes["ffn"],
        num_hidden_layers=sizes["layers"], num_attention_heads=sizes["heads"], num_key_value_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"], tie_word_embeddings=tied, max_position_embeddings=8192,
    )  # fmt: skip


def write_model(directory: Path, sizes: dict[str, int], tied: bool = True) -> None:
    from benchmarks.live.random_training import save_random_model

    save_random_model(_config(sizes, tied), directory)
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")


_kept: list[Any] = []
"""Objects that live as long as this process's group."""


def train(cell: Cell, tiny_dir: Path, model_dir: Path, rank: int, port: int) -> float:
    """In a process of its own: the tiny model, then the model; peak bytes of its last step."""
    import torch

    from benchmarks.live.random_training import random_trajectories
    from libra.train import Replica, TrainSettings
    from libra.train.replica_group import Rendezvous, TrainGroup

    torch.set_num_threads(1)
    token, group = "of a benchmark", None
    if cell.processes > 1:
        if rank == 0:
            _kept.append(Rendezvous(token, "127.0.0.1", port))
        group = TrainGroup.join(("127.0.0.1", port), rank, cell.processes, token=token, timeout_s=600.0)
    settings = TrainSettings(
        lr=1e-4, layout="fsdp2" if cell.layout == "fsdp2" else "ddp", gradient_checkpointing=cell.checkpointing,
        micro_batch_tokens=cell.micro_batch_tokens, max_row_tokens=cell.max_row_tokens, share_prompts=False,
        logit_chunk_tokens=cell.logit_chunk_tokens, **dict(cell.settings),
    )  # fmt: skip
    warm = Replica(tiny_dir, settings, group=group)
    for step in range(2):
        warm.step(random_trajectories(cell.sequences, 64, 8, TINY["vocab"], step), step)
    del warm
    gc.collect()
    replica = Replica(model_dir, settings, group=group)
    for step in range(STEPS):
        vocab = MODELS[cell.model]["vocab"]
        report = replica.step(random_trajectories(cell.sequences, cell.tokens, cell.tokens // 8, vocab, step), step)
    return report.peak_bytes


def measure(cell: Cell, number: int, scratch: Path) -> float:
    model_dir = scratch / cell.model.replace(" ", "-")
    if not model_dir.exists():
        write_model(model_dir, MODELS[cell.model], tied=not cell.model.endswith("untied"))
    port = 29_700 + (os.getpid() + number) % 2_000
    command = [sys.executable, "-m", "benchmarks", "plan_memory", "--cell", json.dumps(asdict(cell)), str(scratch / "tiny"),
               str(model_dir), str(port)]  # fmt: skip
    running = [
        subprocess.Popen(
            [*command, str(rank)], stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        for rank in range(cell.processes)
    ]
    try:
        answers = [process.communicate(timeout=900)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    if any(process.returncode for process in running):
        raise RuntimeError(f"plan_memory: a process of {cell} failed: {[p.returncode for p in running]}")
    return max(float(json.loads(answer.splitlines()[-1])) for answer in answers)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("plan_memory", __doc__)
    parser.add_argument(
        "--only", type=int, nargs="*", help="numbers of the cells to measure, from 0; all where none is given"
    )
    parser.add_argument("--cell", nargs=5, metavar=("CELL", "TINY", "MODEL", "PORT", "RANK"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.cell:
        text, tiny, model, port, rank = options.cell
        values = json.loads(text)
        cell = Cell(**{**values, "settings": tuple(tuple(pair) for pair in values["settings"])})
        print(json.dumps(train(cell, Path(tiny), Path(model), int(rank), int(port))))
        return
    print(f"{'model':12} {'layout':22} {'tokens':>12} {'predicted MB':>12} {'measured MB':>12} {'ratio':>6}")
    errors = []
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory) / "tiny", TINY)
        for number, cell in enumerate(cells()):
            if options.only and number not in options.only:
                continue
            predicted, measured = predicted_bytes(cell), measure(cell, number, Path(directory))
            errors.append(abs(predicted / measured - 1))
            size = f"{cell.sequences}x{cell.tokens}"
            row = f"{cell.model:12} {cell.name:22} {size:>12} {predicted / 1e6:12.0f} {measured / 1e6:12.0f}"
            print(f"{row} {predicted / measured:6.3f}", flush=True)
    figures = {"worst_relative_error": Figure(max(errors), "ratio", "lower", GOAL)}
    emit("plan_memory", figures, arguments=arguments, as_json=options.json)
