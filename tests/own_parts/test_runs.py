"""Runs with parts of a user's own: the workers import them, and replay and simulation too."""

import json
import re
from pathlib import Path

import cloudpickle
import lora
import numpy as np
import own_loss
import pytest
import torch
import zarr
from safetensors.torch import load_file

import libra
from libra.driver.part_checks import loading_error
from libra.driver.run_session import run
from libra.errors import CallbackError, ConfigError
from libra.sim.configured import simulator_of_run
from libra.sim.from_run import run_setting
from libra.testing import FixedTurns
from libra.worker.run_spec import RunSpec

OWN = {
    "model": {"loader": "own_loader:FrozenEmbedding"},
    "trainer": {"loss": "own_loss:one_sided", "advantage": "own_loss:ranked", "lr_schedule": "own_loss:cosine", "warmup_steps": 0},
    "policy": {"name": "own_policy:FewestTurnsFirst"},
    "rollout": {"engine": "own_engine:RemembersGreedy"},
}  # fmt: skip


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.core
def test_a_run_with_its_own_loss_advantage_schedule_policy_engine_and_callbacks(make_config, client, repository):
    from click.testing import CliRunner

    from libra.cli.main import cli
    from libra.testing import FixedTurns

    class Graded(FixedTurns):
        def grade(self, episode):
            return float(len(episode.turns[0].token_ids) and episode.turns[0].token_ids[0] % 5)

    config = make_config(**OWN)
    called = []
    callbacks = {
        "on_iteration": lambda values: called.append(("iteration", values["iteration"], values["lr"])),
        "on_batch": lambda batch, members: called.append(("batch", batch, [member.advantage for member in members])),
    }
    summary = run(config, environment=Graded(), client=client, callbacks=callbacks)
    lr = config.trainer.lr
    assert [row["lr"] for row in summary.iterations] == [lr * own_loss.cosine(step, settings=None) for step in range(2)]
    assert [each[:2] for each in called] == [("batch", 0), ("iteration", 0), ("batch", 1), ("iteration", 1)]
    columns = zarr.open_group(summary.directory / "trajectories.zarr", mode="r")["trajectory"]
    rewards = columns["reward"][:].reshape(-1, 2)
    expected = np.sign(rewards[:, :, None] - rewards[:, None, :]).sum(2) / 2
    assert np.array_equal(columns["advantage"][:].reshape(-1, 2), expected)
    assert [a for kind, _, given in called if kind == "batch" for a in given] == expected.ravel().tolist()

    lines = [json.loads(line) for line in (summary.directory / "events.jsonl").read_text().splitlines()]
    assert lines[0]["policy"] == "own_policy:FewestTurnsFirst"
    reasons = {line["reason"] for line in lines if line["name"] == "priority_set"}
    assert reasons >= {"0 quanta are done", "1 quanta are done"}
    served = [line for line in lines if line["name"] == "version_served"]
    assert served and all(line["bucket"].startswith("own_engine:RemembersGreedy-tp1") for line in served)
    checked = {line["version"] for line in lines if line["name"] == "version_checked"}
    assert checked >= {0, 1, 2}, "engines prove what the loader built"
    assert summary.checkpoint is not None
    trained, base = (load_file(Path(of) / "model.safetensors") for of in (summary.checkpoint, config.model.path))
    assert {name for name in base if not torch.equal(trained[name], base[name])} == base.keys() - {EMBEDDING}
    replayed = CliRunner().invoke(cli, ["replay", str(summary.directory)])
    assert replayed.exit_code == 0, replayed.output
    assert "Every decision was reproduced." in replayed.output
    assert simulator_of_run(run_setting(summary.directory))[0].run().trajectories == 8


def test_a_callback_that_raises_ends_the_run_and_it_can_be_resumed(make_config, client):
    def fails(values):
        raise OSError("no space on the phone")

    config = make_config(observe={"callbacks": {"on_iteration": "callbacks_of_test:seen"}})
    with pytest.raises(ConfigError, match="callbacks_of_test"):
        run(config, client=client)
    config = make_config()
    with pytest.raises(CallbackError, match="on_iteration"):
        run(config, client=client, callbacks={"on_iteration": fails})
    summary = run(config, client=client, resume=True)
    assert [row["iteration"] for row in summary.iterations] == [1]


@pytest.mark.parametrize(("field", "value"), [
    ("trainer.advantage", "own_loss:missing"),
    ("trainer.lr_schedule", "own_loss:one_sided"),
    ("rollout.engine", "own_loss:cosine"),
    ("observe.callbacks.on_batch", "own_loss:cosine"),
    ("model.loader", "own_loss:cosine"),
])  # fmt: skip
def test_a_part_of_the_wrong_shape_is_one_line_before_anything_starts(make_config, field, value, tmp_path):
    section, key, *inner = field.split(".")
    with pytest.raises(ConfigError) as caught:
        run(make_config(**{section: {key: {inner[0]: value} if inner else value}}))
    assert str(caught.value).startswith(f"{field}: {value!r}")
    assert "\n" not in str(caught.value)
    assert not any(tmp_path.iterdir())


def test_a_worker_that_cannot_import_a_part_names_the_setting(make_config, tmp_path):
    def found_by(**sections):
        return loading_error(cloudpickle.dumps(RunSpec("demo", 0, tmp_path, "", make_config(**sections))))

    assert found_by(**OWN) is None
    field, reason = found_by(trainer={"loss": "gone_from_here:f"}) or ("", "")
    assert field == "trainer.loss"
    assert reason.startswith("trainer.loss: 'gone_from_here:f': cannot import 'gone_from_here'")
    assert (found_by(model={"loader": "gone_from_here:f"}) or ("",))[0] == "model.loader"
    assert (found_by(rollout={"engine": "gone_from_here:f"}) or ("",))[0] == "rollout.engine"


BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def page(repository):
    """The names that docs/own_environment.md and docs/extend.md define; in no module, so that workers get them by value."""
    names = {"__name__": "page_of_own_environment"}
    for name in ("own_environment", "extend"):
        for block in BLOCK.findall((repository / "docs" / f"{name}.md").read_text()):
            if not block.startswith("# workflows/"):
                exec(compile(block, f"docs/{name}.md", "exec"), names)
    return names


def test_the_environment_of_the_page_keeps_its_contract(page):
    contract = page["TestLetters"]()
    for name in dir(contract):
        if name.startswith("test_"):
            getattr(contract, name)()


def test_a_run_trains_publishes_and_resumes_with_adapters(client, random_model, tmp_path):
    arguments = {
        "environment": FixedTurns(), "client": client, "run__dir": str(tmp_path), "run__name": "lora", "run__iterations": 1,
        "trainer__lr": 1e-2, "trainer__prompts": 2, "trainer__group_size": 2, "rollout__max_new_tokens": 4,
        "rollout__max_turns": 2, "rollout__ignore_eos": True, "observe__progress": False, **lora.LORA,
    }  # fmt: skip
    libra.train(str(random_model), **arguments)
    summary = libra.train(str(random_model), resume=True, **{**arguments, "run__iterations": 2})
    assert [row["iteration"] for row in summary.iterations] == [1]
    lines = [json.loads(line) for line in (summary.directory / "events.jsonl").read_text().splitlines()]
    checked = [line for line in lines if line["name"] == "version_checked"]
    assert {line["version"] for line in checked} >= {0, 1, 2}, "engines have proved each version"
    assert summary.checkpoint is not None
    merged = load_file(Path(summary.checkpoint) / "model.safetensors")
    adapters = load_file(Path(summary.checkpoint) / "adapter" / "adapter_model.safetensors")
    base = load_file(random_model / "model.safetensors")
    for layer in ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj"):
        a, b = (adapters[f"base_model.model.{layer}.lora_{ab}.weight"] for ab in "AB")
        assert b.any()
        change = merged[f"{layer}.weight"] - base[f"{layer}.weight"]
        assert change.sub(2.0 * (b @ a)).abs().max() < 1e-6
    assert (merged["model.embed_tokens.weight"] == base["model.embed_tokens.weight"]).all()
