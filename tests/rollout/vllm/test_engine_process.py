import asyncio
import os
import select
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from libra.config.sections import vllm_is_installed
from libra.rollout.vllm.async_engine import VLLMEngine
from libra.rollout.vllm.worker_extension import skip_draws
from libra.testing.parts import Models

PROGRAM = """
import asyncio, sys
from pathlib import Path
import psutil
from libra.rollout import VLLMEngine
from libra.testing.parts import Models

async def main():
    await VLLMEngine(Models(Path(sys.argv[1])).first, threads=1, slots=2, max_context_tokens=128).start()
    print("STARTED", *[each.pid for each in psutil.Process().children(recursive=True)], flush=True)
    sys.stdin.read()

asyncio.run(main())
"""


@pytest.mark.parametrize(("kernel", "fp64"), [("forward_cpu", False), ("forward_cpu", True), ("forward_native", False)])
def test_a_continued_request_skips_what_its_tokens_drew(kernel, fp64):
    vocab, dtype = 300, torch.float64 if fp64 else torch.float32

    def draw(generator):
        if kernel == "forward_cpu" and not fp64:
            return torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
        return torch.empty(vocab, dtype=dtype).exponential_(generator=generator)

    def forward(): ...

    forward.__name__ = kernel
    sampler = SimpleNamespace(topk_topp_sampler=SimpleNamespace(forward=forward, use_fp64_gumbel=fp64))
    whole, parts = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    drawn = [draw(whole) for _ in range(20)]
    skip_draws(parts, 13, SimpleNamespace(sampler=sampler, input_batch=SimpleNamespace(vocab_size=vocab)))
    assert all(torch.equal(draw(parts), each) for each in drawn[13:])


@pytest.mark.vllm
@pytest.mark.skipif(not vllm_is_installed(), reason="vllm is not installed here: make setup-vllm")
@pytest.mark.timeout(600)
def test_a_closed_engine_leaves_no_process_and_no_shared_memory(tmp_path):
    engine = VLLMEngine(Models(tmp_path).first, threads=1, slots=2, max_context_tokens=128, tp=2)

    def shared(processes):
        """What these processes map of /dev/shm: another test's engine may be running."""
        maps = (each.path for process in processes for each in process.memory_maps())
        return {p for p in maps if p.startswith(("/dev/shm/psm_", "/dev/shm/vllm_dist_")) and Path(p).exists()}

    async def body():
        await engine.start()
        core = psutil.Process(engine.process_ids[0])
        processes = [core, *core.children(recursive=True)]
        found = processes, shared(processes)
        await engine.close()
        return found

    processes, memory = asyncio.run(body())
    assert len(processes) >= 3 and len(memory) > 2  # a queue of the two ranks, and what they reduce in
    assert psutil.wait_procs(processes, timeout=60)[1] == []
    assert not [path for path in memory if Path(path).exists()]


@pytest.mark.vllm
@pytest.mark.skipif(not vllm_is_installed(), reason="vllm is not installed here: make setup-vllm")
@pytest.mark.timeout(600)
def test_an_engine_does_not_outlive_the_process_that_started_it(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as worker:
        line = next((line for line in worker.stdout if line.startswith("STARTED")), "")
        watched = [os.pidfd_open(int(pid)) for pid in line.split()[1:]]
        worker.kill()
    assert watched
    for each in watched:
        select.select([each], [], [])
        os.close(each)
