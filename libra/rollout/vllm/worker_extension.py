"""Libra's methods in vLLM's worker processes: loading a version, and outputs of layers as used.

vLLM mixes `LibraWorker` into its worker class (``worker_extension_cls``) and calls it on every
rank.

1. After `LibraWorker.libra_load` every module computes with the file's weights; packed copies are
   packed again, which vLLM 0.32 on a CPU omits for an output head tied to the embedding.
2. `LibraWorker.libra_outputs` goes through the modules' own ``apply``, and never reads a matrix
   from a parameter.
3. The parts that all ranks return add up to the output of the whole layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from libra.projections import draw_input, draw_rows, generator_of
from libra.rollout.vllm.engine_args import GENERATED
from libra.rollout.weight_loading import HEAD


class Part(NamedTuple):
    """Rows of a layer's output that one rank computed; msgpack-able. ``data`` is float32 (num_rows,
    num_here) as bytes: entries ``offset`` onwards of outputs with ``whole`` entries. ``inputs`` is
    the layer's total number of inputs, or of rows for an embedding."""

    num_rows: int
    num_here: int
    offset: int
    whole: int
    inputs: int
    data: bytes


class LibraWorker:
    """Methods that ``AsyncLLM.collective_rpc`` can call; ``self`` is vLLM's worker."""

    def libra_load(self, path: str, tied_to: str | None) -> None:
        """Load a safetensors file in place; ``tied_to`` is the embedding tied to the head."""
        worker: Any = self
        worker.reload_weights(weights_iterator=_tensors(Path(path), tied_to), is_checkpoint_format=True)
        with torch.no_grad():
            _pack_embeddings_again(worker.model_runner.get_model())

    def libra_continue_turns(self) -> None:
        """Let a request that continues a turn skip the random numbers of its earlier tokens. vLLM's
        model runner V1 draws from a generator per request; runner V2 by seed and position."""
        worker: Any = self
        runner = worker.model_runner
        if not hasattr(runner, "requests"):
            return
        update = runner._update_states

        def update_and_skip(scheduled: Any) -> Any:
            result = update(scheduled)
            for each in scheduled.scheduled_new_reqs:
                generated = ((each.sampling_params and each.sampling_params.extra_args) or {}).get(GENERATED, 0)
                generator = runner.requests[each.req_id].generator
                if generated and generator is not None:
                    skip_draws(generator, generated, runner)
            return result

        runner._update_states = update_and_skip

    def libra_outputs(self, seed: int | None, wanted: Mapping[str, Sequence[int]] | None) -> dict[str, Part]:
        """This rank's parts of the outputs of layers, by the Hugging Face name of their weight.

        With ``seed``, every layer, for the inputs of `libra.projections`. Else the ``wanted``
        columns of each matrix (one-hot inputs) or rows of an embedding, and norms and biases whole.
        """
        worker: Any = self
        with torch.no_grad():
            return dict(_outputs(worker.model_runner.get_model(), seed, wanted or {}))


def skip_draws(generator: torch.Generator, tokens: int, runner: Any) -> None:
    """Draw the numbers of ``tokens`` sampled tokens from a request's generator (runner V1): one
    number per token for the CPU's kernel, else an exponential number per vocabulary entry."""
    sampler, vocab = runner.sampler.topk_topp_sampler, runner.input_batch.vocab_size
    fp64 = bool(getattr(sampler, "use_fp64_gumbel", False))
    if sampler.forward.__name__ == "forward_cpu" and not fp64:
        torch.randint(0, 2**31, (tokens,), generator=generator, dtype=torch.long)
        return
    noise = torch.empty(vocab, dtype=torch.float64 if fp64 else torch.float32, device=generator.device)
    if generator.device.type == "cpu":
        for _ in range(tokens):
            noise.exponential_(generator=generator)
        return
    begin = generator.get_offset()
    noise.exponential_(generator=generator)
    generator.set_offset(begin + tokens * (generator.get_offset() - begin))


def _tensors(path: Path, tied_to: str | None) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        for name in names:
            if name == HEAD and tied_to is not None:
                if tied_to not in names:
                    yield tied_to, file.get_tensor(name)
            else:
                yield name, file.get_tensor(name)


def _pack_embeddings_again(model: torch.nn.Module) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
            module.quant_method.process_weights_after_loading(module)


def _outputs(model: Any, seed: int | None, wanted: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, Part]]:
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for prefix, module in model.named_modules():
        name = f"{prefix}.weight"
        if isinstance(module, ParallelLMHead):
            x = _inputs(name, seed, wanted, module.embedding_dim)
            if x is not None:
                shard = module.shard_indices
                start, count = shard.org_vocab_start_index, shard.num_org_elements
                y = _apply(module, x)[:, :count]
                yield name, _part(y, start, module.org_vocab_size, module.embedding_dim)
        elif isinstance(module, VocabParallelEmbedding):
            ids = _ids(name, seed, wanted, module.org_vocab_size)
            if ids is not None:  # the module gathers over all ranks, so only one rank returns the result
                y = module(ids.to(module.weight.device)).float().cpu()
                yield name, _part(y if module.tp_rank == 0 else y * 0, 0, y.shape[1], module.org_vocab_size)
        elif isinstance(module, LinearBase):
            parent, _, leaf = prefix.rpartition(".")
            names = [f"{parent}.{part}" for part in packed.get(leaf, [leaf])]
            yield from _linear(module, names, seed, wanted)
        elif seed is None and name in wanted and getattr(module, "weight", None) is not None:
            y = module.weight.float().cpu()[None]
            yield name, _part(y if _is_first_rank() else y * 0, 0, y.shape[1], y.shape[1])


def _linear(
    module: Any, names: list[str], seed: int | None, wanted: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, Part]]:
    from vllm.model_executor.layers.linear import RowParallelLinear

    begin = 0
    for name, (count, offset, whole, mine) in zip(names, _shares(module), strict=True):
        x = _inputs(f"{name}.weight", seed, wanted, module.input_size)
        if x is not None:
            if isinstance(module, RowParallelLinear):
                x = x.chunk(module.tp_size, 1)[module.tp_rank]
            y = _apply(module, x)[:, begin : begin + count]
            yield f"{name}.weight", _part(y if mine else y * 0, offset, whole, module.input_size)
        if seed is None and f"{name}.bias" in wanted:
            y = module.bias.float().cpu()[None, begin : begin + count]
            alone = mine and (offset > 0 or count < whole or _is_first_rank())
            yield f"{name}.bias", _part(y if alone else y * 0, offset, whole, whole)
        begin += count


def _shares(module: Any) -> list[tuple[int, int, int, bool]]:
    """For each layer: outputs here, their offset, all outputs, whether this rank answers."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear

    rank, ranks = module.tp_rank, module.tp_size
    if isinstance(module, QKVParallelLinear):
        heads = [(module.num_heads * module.head_size, rank, module.total_num_heads * module.head_size, True)]
        turn, replica = divmod(rank, module.num_kv_head_replicas)
        for size in (module.head_size, module.v_head_size):
            heads.append((module.num_kv_heads * size, turn, module.total_num_kv_heads * size, replica == 0))
        return [(count, place * count, whole, mine) for count, place, whole, mine in heads]
    if isinstance(module, ColumnParallelLinear):
        sizes = getattr(module, "output_sizes", [module.output_size])
        return [(size // ranks, rank * (size // ranks), size, True) for size in sizes]
    if isinstance(module, RowParallelLinear):
        return [(module.output_size, 0, module.output_size, True)]  # parts of a sum
    sizes = getattr(module, "output_sizes", [module.output_size])
    return [(size, 0, size, _is_first_rank()) for size in sizes]


def _inputs(name: str, seed: int | None, wanted: Mapping[str, Sequence[int]], width: int) -> Tensor | None:
    if seed is not None:
        return torch.from_numpy(draw_input(generator_of(seed, name), width))[None]
    if name in wanted:
        return F.one_hot(torch.tensor(list(wanted[name])), width).float()
    return None


def _ids(name: str, seed: int | None, wanted: Mapping[str, Sequence[int]], rows: int) -> Tensor | None:
    if seed is not None:
        return torch.from_numpy(draw_rows(generator_of(seed, name), rows))
    return torch.tensor(list(wanted[name])) if name in wanted else None


def _apply(module: Any, x: Tensor) -> Tensor:
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    given = x.to(device=device, dtype=module.params_dtype).contiguous()
    result: Tensor = module.quant_method.apply(module, given, None).float().cpu()
    return result


def _part(rows: Tensor, offset: int, whole: int, inputs: int) -> Part:
    data = np.ascontiguousarray(rows.numpy(), np.float32).tobytes()
    return Part(rows.shape[0], rows.shape[1], int(offset), int(whole), int(inputs), data)


def _is_first_rank() -> bool:
    from vllm.distributed import get_tensor_model_parallel_rank

    return bool(get_tensor_model_parallel_rank() == 0)
