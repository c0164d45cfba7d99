"""Engine processes that are forked from one that has imported vLLM: they start, come back, and end with whoever started them."""

import os
import select
import signal
import subprocess
import sys

import pytest

from libra.rollout.vllm_settings import is_installed

PROGRAM = """
import asyncio, os, signal, sys
from pathlib import Path
import psutil
from libra.errors import EngineError
from libra.rollout import vllm_fork_server
from libra.rollout.vllm_engine import VLLMEngine
from libra.testing.models import Models, ask

async def made(engine):
    while True:
        try:
            return (await engine.generate(ask("x", new=8, seed=3))).token_ids.tolist()
        except EngineError:  # it died, and another process is started
            continue

def parent(process):
    return psutil.Process(process).ppid()

async def main():
    model = Models(Path(sys.argv[1])).first
    engine = VLLMEngine(model, threads=1, slots=4, max_context_tokens=512)
    await engine.start()
    first, server = await made(engine), vllm_fork_server._server.pid
    assert parent(engine.process_ids[0]) == server and parent(server) == os.getpid()
    os.kill(engine.process_ids[0], signal.SIGKILL)
    assert await made(engine) == first and engine.restarts == 1
    assert parent(engine.process_ids[0]) == server == vllm_fork_server._server.pid
    await engine.close()
    two = VLLMEngine(model, threads=1, slots=4, max_context_tokens=512, tp=2)
    await two.start()
    assert await made(two) == first and parent(two.process_ids[0]) == server
    assert len(psutil.Process(two.process_ids[0]).children()) == 2
    os.kill(server, signal.SIGKILL)  # whose engine dies with it
    assert await made(two) == first and two.restarts == 1
    assert parent(two.process_ids[0]) == vllm_fork_server._server.pid != server
    print("LEFT", *[each.pid for each in psutil.Process().children(recursive=True)], flush=True)
    sys.stdin.read()

asyncio.run(main())
"""


@pytest.mark.vllm
@pytest.mark.skipif(not is_installed(), reason="vllm is not installed here: make setup-vllm")
@pytest.mark.timeout(600)
def test_engines_come_back_by_a_fork_and_outlive_neither_their_server_nor_their_worker(tmp_path):
    """By real kills: of an engine process, of the fork server, of the process that started both."""
    command, pipes = (
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE},
    )
    worker = subprocess.Popen(command, text=True, **pipes)
    assert worker.stdout is not None
    told = next((line for line in worker.stdout if line.startswith("LEFT")), "")
    watched = []
    for pid in told.split()[1:]:
        try:
            watched.append(os.pidfd_open(int(pid)))
        except ProcessLookupError:
            continue
    os.kill(worker.pid, signal.SIGKILL)
    worker.communicate()
    assert len(watched) >= 4, "fork server, engine and two ranks"
    for each in watched:
        select.select([each], [], [])
        os.close(each)
