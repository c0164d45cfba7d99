"""What sampled tokens draw from a request's generator in vLLM."""

from __future__ import annotations

from typing import Any

import torch


def skip_draws(generator: torch.Generator, tokens: int, runner: Any) -> None:
    """Draw what ``tokens`` sampled tokens of vLLM's model runner V1 draw from a request's generator.

    On a CPU that is one number per token, from which its kernel makes the noise, or an exponential number per entry of the
    vocabulary; elsewhere always the latter, and the offset of the generator grows by the same for each token.
    """
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
