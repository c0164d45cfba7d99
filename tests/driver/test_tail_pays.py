"""The tail's role switch, live and unprompted: an engine trains while a straggler generates, because this run's own prices say so.

Training is slowed down in every worker, as `min_pass_s` slows engines down: a tiny model has no backlog of its own.
"""

import hashlib
import threading

import pytest
from distributed import Client
from streamed_runs import check_whole, events_of

from libra import facts
from libra.cluster.local import local_cluster
from libra.config import config_from_dict
from libra.driver.run_session import Session
from libra.envs import tool
from libra.envs.environment import ScriptedTurn
from libra.testing import FixedTurns
from libra.types import Episode, Prompt, ToolCall, TrajectoryId

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

TURNS, SAMPLE_S = (1, 2, 4, 6, 8, 10, 28), 0.4
PROMPTS = len(TURNS)
ENGINES = [{"count": 2, "threads": 1, "slots": 8, "min_pass_s": 0.02}]
WORKERS = {"engines": ENGINES, "hybrid_workers": 1, "threads": 1, "dashboard_port": 0}


class Straggler(FixedTurns):
    """Groups end one after the other, the last one long after the others."""

    def __init__(self) -> None:
        super().__init__()
        self.tools = (tool(self.echo),)

    def scripted(self, tid: TrajectoryId, prompt: Prompt, turn: int) -> ScriptedTurn:
        last = TURNS[int(prompt.prompt_id.split("-")[1]) % PROMPTS]
        return ScriptedTurn(12, (ToolCall("echo", {"text": "y"}),) if turn + 1 < last else ())

    def grade(self, episode: Episode) -> float:
        return hashlib.blake2b(repr(episode.trajectory_id).encode(), digest_size=1).digest()[0] / 256


def slow_gradients() -> None:
    """The gradient of a sample takes `SAMPLE_S` more."""
    from libra.train.slice_gradient import SliceGradient

    whole = SliceGradient.accumulate

    def slowly(self, samples, *arguments):
        threading.Event().wait(SAMPLE_S * len(samples))  # the emulated speed of the trainer
        return whole(self, samples, *arguments)

    SliceGradient.accumulate = slowly


def test_an_engine_trains_in_the_tail_where_it_pays_and_returns(make_config, tmp_path):
    trainer = {"prompts": PROMPTS, "group_size": 2, "streaming": "on", "turning": "on"}
    rollout = {"slots": 8, "ignore_eos": True, "max_turns": max(TURNS), "max_context_tokens": 1024}
    config = make_config(run={"iterations": 3}, trainer=trainer, rollout=rollout, cluster=WORKERS)
    workers = config_from_dict({"cluster": WORKERS, "rollout": {"slots": 8}})
    with local_cluster(workers) as started, Client(started) as client:
        client.run(slow_gradients)
        with Session(config, client=client, environment=Straggler()) as session:
            rows = list(session.iterations())
            found = events_of(session.directory)
    turned = [(each.worker, each.to) for each in found if isinstance(each, facts.Turn)]
    assert turned[:2] == [("rollout-0", "training"), ("rollout-0", "rollout")]
    waves = [each for each in found if isinstance(each, facts.WaveTrained)]
    alone_s, helped_s = (min(w.train_s / w.groups for w in waves if bool(w.hybrids) == h) for h in (False, True))
    assert helped_s < 0.8 * alone_s
    assert sum(row["hybrids_lost"] for row in rows) == 0
    check_whole(session.directory, 3, config)
