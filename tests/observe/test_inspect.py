"""`libra inspect`: which trajectories are shown, what of them, and how keys step through them."""

import io
import json
import math
import re
import shutil

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models

from factories import trajectory
from libra.errors import ModelError
from libra.observe.inspect import inspect_run
from libra.observe.trajectory_view import load_decode
from libra.store.trajectory_store import TrajectoryStore
from libra.types import EndReason, FailureClass, Prompt, TrajectoryId

WORDS = ["<|im_start|>", "user", "2+3", "<|im_end|>", "assistant", "<tool_call>add</tool_call>", "tool", "5", "answer"]
#        prompt                                            generated                                observed  generated
IDS = [0, 1, 2, 3, 4, 5, 3, 0, 6, 7, 3, 0, 4, 8, 7, 3]
ACTION = [False] * 5 + [True] * 2 + [False] * 6 + [True] * 3


def _trajectory(iteration, sample, reward, split="train", **changes):
    action = np.array(ACTION)
    turn = {"generate_s": 0.5, "tool_s": 0.25, "worker": "rollout-0", "stop_reason": "stop"}
    versions = np.where(action, iteration, -1).astype(np.int32)
    values = {
        "prompt": Prompt("q-17", ({"role": "user", "content": "2+3"},), {"answer": 5}),
        "token_ids": np.array(IDS, np.int32), "is_action": action, "weight_version": versions, "kv_version": versions,
        "behaviour_logprob": np.where(action, -0.125, 0).astype(np.float32), "reward": reward, "advantage": 0.75,
        "turns": [{"turn": 0, "tool": "add", "status": "ok", **turn}, {"turn": 1, "tool": "", "status": "", **turn}],
    }  # fmt: skip
    return trajectory(TrajectoryId(iteration, 0, sample, split), **values | changes)


@pytest.fixture(scope="module")
def made_run(tmp_path_factory):
    run = tmp_path_factory.mktemp("made") / "demo"
    broken = {"failure": FailureClass.TOOL, "failure_detail": "the tool hung", "end_reason": EndReason.FAILURE}
    with TrajectoryStore.create(run / "trajectories.zarr") as store:
        store.append([_trajectory(0, 0, 0.25), _trajectory(0, 1, 1.0)], batch=0)
        store.append([_trajectory(1, 0, math.nan, **broken), _trajectory(1, 1, 0.0)], batch=1)
        store.append([_trajectory(1, 0, 0.5, "eval")])
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="user"))
    tokenizer.decoder = decoders.Fuse()
    (run / "tokenizer").mkdir()
    tokenizer.save(str(run / "tokenizer" / "tokenizer.json"))
    return run


@pytest.fixture
def run_dir(made_run, tmp_path):
    return shutil.copytree(made_run, tmp_path / "runs" / "demo")


def _shown(run_dir, *, styles=False, **choice):
    console = Console(file=io.StringIO(), width=200, force_terminal=styles, color_system="standard" if styles else None)
    inspect_run(run_dir, console=console, **choice)
    return console.file.getvalue()


def _ids(run_dir, **choice):
    lines = _shown(run_dir, as_json=True, **{"limit": 99} | choice).splitlines()
    return [json.loads(line)["trajectory"] for line in lines]


@pytest.mark.parametrize(("choice", "expected"), [
    ({}, ["train-0-0-0", "train-0-0-1", "train-1-0-0", "train-1-0-1", "eval-1-0-0"]),
    ({"iteration": 1, "split": "train"}, ["train-1-0-0", "train-1-0-1"]),
    ({"sample": 1}, ["train-0-0-1", "train-1-0-1"]),
    ({"failed": True}, ["train-1-0-0"]),
    ({"index": -1}, ["eval-1-0-0"]),
    ({"limit": 1}, ["train-0-0-0"]),
    ({"order": "best"}, ["train-0-0-1", "eval-1-0-0", "train-0-0-0", "train-1-0-1", "train-1-0-0"]),
    ({"order": "worst", "iteration": 1}, ["train-1-0-1", "eval-1-0-0", "train-1-0-0"]),
])  # fmt: skip
def test_filters_and_order_choose_what_is_shown(made_run, choice, expected):
    assert _ids(made_run, **choice) == expected


def test_the_page_says_text_turns_reward_and_why_it_ended(made_run):
    page = _shown(made_run, index=0)
    assert "<|im_start|>user2+3<|im_end|>assistant<tool_call>add</tool_call><|im_end|><|im_start|>tool5" in page
    assert re.search(r"reward +0\.25 +advantage \+0\.7500", page)
    assert re.search(r"ended +answered", page)
    assert "16, of which 5 generated; weight versions 0 to 0" in page
    assert "consumed by batch 0" in page
    assert re.search(r"q-17 +\{'answer': 5\}", page)
    assert re.search(r"0 .*add .*ok .*0\.500 .*0\.250 .*rollout-0", page)
    assert "log-prob" not in page


def test_a_failure_is_shown_with_its_class_and_detail_and_no_reward(made_run):
    page = _shown(made_run, index=2)
    assert re.search(r"ended +failure +failure: tool the tool hung", page)
    assert re.search(r"reward +not graded", page)


def test_generated_and_read_tokens_have_different_styles(made_run):
    page = _shown(made_run, index=0, styles=True)
    style = {text: re.search(r"((?:\x1b\[[\d;]*m)+)" + re.escape(text), page)[1] for text in ("<tool_call>", "answer5")}
    assert style["<tool_call>"] == style["answer5"]
    assert not re.search(re.escape(style["answer5"]) + re.escape("<|im_start|>"), page)


def test_every_token_is_listed_on_request(made_run):
    page = _shown(made_run, index=0, tokens=True)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in page.splitlines() if line.count("│") == 8]
    assert [int(row[1]) for row in rows] == IDS
    assert [row[2] for row in rows] == [WORDS[i] for i in IDS]
    assert rows[5][3:] == ["generated", "-0.1250", "0", "0"]
    assert rows[8][3:] == ["observation", "", "", ""]


def test_json_holds_the_same_and_is_json(made_run):
    (line,) = _shown(made_run, index=2, as_json=True, tokens=True).splitlines()
    page = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert page["reward"] is None
    assert (page["failure"], page["failure_detail"], page["batch"]) == ("tool", "the tool hung", 1)
    assert page["prompt"]["facts"] == {"answer": 5}
    assert [segment["origin"] for segment in page["segments"]] == ["prompt", "generated", "observation", "generated"]
    assert "".join(segment["text"] for segment in page["segments"]) == "".join(WORDS[i] for i in IDS)
    assert [token["id"] for token in page["tokens"]] == IDS
    assert page["tokens"][5] == {
        "id": 5, "text": WORDS[5], "generated": True, "logprob": -0.125, "version": 1, "kv_version": 1,
    }  # fmt: skip
    assert page["tokens"][0]["logprob"] is None
    assert page["turns"][0]["tool"] == "add"


def test_keys_step_through_the_selection_and_turn_tokens_on_and_off(made_run):
    keys = iter("nnxptq")
    page = _shown(made_run, split="train", read_key=lambda: next(keys))
    assert re.findall(r"trajectory +train-(\S+)", page) == ["0-0-0", "0-0-1", "1-0-0", "0-0-1", "0-0-1"]
    assert page.count("log-prob") == 1
    assert next(keys, None) is None


def test_the_tokenizer_is_found_through_the_configuration(run_dir, tmp_path):
    model = tmp_path / "model"
    (run_dir / "tokenizer").rename(model)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    (run_dir / "config.resolved.yaml").write_text(f"model:\n  path: {model}\n")
    assert load_decode(run_dir)([4, 8]) == "assistantanswer"


def test_nothing_that_fits_is_said_with_what_there_is(made_run):
    page = _shown(made_run, iteration=9, failed=True)
    assert re.findall(r"\d+", page) == ["9", "5", "0", "1"]


def test_a_configuration_that_is_no_yaml_is_an_error_of_the_model(tmp_path):
    (tmp_path / "config.resolved.yaml").write_bytes(b"model: \xff\n")
    with pytest.raises(ModelError):
        load_decode(tmp_path)
