"""A run whose model writes hostile calls, whose tools return hostile text and whose reward raises it: it ends, and goes on."""

import hashlib
import json
from collections import Counter

import numpy as np
import pytest
import torch

from hostile_input import Tools
from libra.driver.run_session import run
from libra.envs import Environment
from libra.observe.metrics import read_metrics
from libra.store.event_log import read_events
from libra.store.trajectory_store import TrajectoryStore
from libra.testing.hostile_text import hostile_texts

ENDS_A_RUN = [  # each of these alone ended a run for good, before what enters a record was made storable
    *(json.dumps({"name": f"{chr(0xD800 + i)}", "arguments": {}}) for i in range(8)),
    *(f'{{"name": "echo", "arguments": {{"text": {"[" * depth}{"]" * depth}}}}}' for depth in range(850, 990, 10)),
    *(json.dumps({"name": "echo", "arguments": {"text": f"{chr(0xDC00 + i)}"}}) for i in range(8)),
    *(json.dumps({"name": "raises", "arguments": {"text": f"{chr(0xDC00 + i)}"}}) for i in range(8)),
    *(json.dumps({"name": "faults", "arguments": {"text": f"{chr(0xDC00 + i)}"}}) for i in range(4)),
]


class Hostile(Tools):
    """Its reward raises hostile text for one sample of each group, and is too large for another."""

    def parse(self, text):
        return Environment.parse(self, text)

    def grade(self, episode):
        if episode.trajectory_id.endswith("-1"):
            raise ValueError("\udc00\x9b31m" + episode.answer)
        if episode.trajectory_id.endswith("-2"):
            return 1e308
        return hashlib.blake2b(episode.answer.encode(), digest_size=1).digest()[0] / 256


@pytest.fixture(scope="module")
def hostile_model(random_model, tmp_path_factory):
    """The random model with hostile calls as words: it writes about one every second token."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    directory = tmp_path_factory.mktemp("hostile_model")
    words = [text for text in hostile_texts(largest_chars=20_000) if "<tool_call>" in text and len(text) <= 20_000]
    words = [text for text in words if text == text.encode(errors="replace").decode()]  # the others are no words
    words += [f"<tool_call>{call}</tool_call>" for call in ENDS_A_RUN]
    tokenizer = AutoTokenizer.from_pretrained(random_model)
    tokenizer.add_tokens(words)
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen3Config.from_pretrained(random_model, vocab_size=len(tokenizer))
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def test_a_hostile_model_does_not_end_its_run_and_a_resume_goes_on(hostile_model, make_config, client):
    sections = {"model": {"path": str(hostile_model)}, "rollout": {"max_new_tokens": 3, "max_turns": 3}}
    sections |= {"trainer": {"prompts": 2, "group_size": 8}, "observe": {"trackers": ["tensorboard"]}}
    config = make_config(run={"iterations": 1}, **sections)
    first = run(config, environment=Hostile(), client=client)
    assert len(first.iterations) == 1
    more = make_config(run={"iterations": 2}, **sections)
    second = run(more, environment=Hostile(), client=client, resume=True)
    assert [values["iteration"] for values in second.iterations] == [1]
    with TrajectoryStore.open(first.directory / "trajectories.zarr") as store:
        columns = store.columns()
    assert len(columns["sample"]) == 32
    failures = Counter(map(str, columns["failure"]))
    assert failures["reward"] == 8, "four samples whose reward raises, four with a reward that no gradient survives"
    assert failures["policy"] + failures["none"] + failures["tool"] == 24
    assert np.isfinite(columns["advantage"]).all()
    events = read_events(first.directory / "events.jsonl").events
    events = [event for event in events if event["name"] == "quantum_finished"]
    tools, statuses = Counter(event["tool"] for event in events), Counter(event["status"] for event in events)
    assert set(tools) <= {"", "echo", "raises", "faults"}, "a tool that the model made up is counted as one"
    assert statuses.keys() >= {"ok", "error", "malformed"}, statuses
    assert [line["step"] for line in read_metrics(first.directory)] == [0, 1]
