"""A run one of whose engines goes wrong after its check: `libra diagnose` names step, version, engine, tokens and layer."""

from __future__ import annotations

from collections.abc import Callable

from click.testing import CliRunner
from distributed import Client
from live_runs import WIDE, address_of

from libra.cli.main import cli
from libra.config import RunConfig
from libra.driver.session import run
from libra.observe.mismatch_diagnosis import diagnose

FIRST = 2
LAYER = "model.layers.1.mlp.down_proj.weight"


def disturb_layer(first: int) -> None:
    """On a worker: from version ``first`` on, `LAYER` of its engine gets noise before the first turn of each version."""
    import torch

    from libra.rollout import TransformersEngine

    whole = TransformersEngine.generate

    def disturb(batch, version: int) -> None:
        weight = batch.model.get_parameter(LAYER)
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(version))
        with torch.no_grad():
            weight.add_(noise * weight.square().mean().sqrt() * 0.3)
        batch.forward.weights_changed()

    async def generate(engine, request):
        if engine.version >= first and getattr(engine, "disturbed", -1) < engine.version:
            engine.disturbed = engine.version
            await engine._ask(disturb, engine._open(), engine.version)
        return await whole(engine, request)

    generate.whole = whole
    TransformersEngine.generate = generate


def restore() -> None:
    """The worker serves other tests."""
    from libra.rollout import TransformersEngine

    TransformersEngine.generate = TransformersEngine.generate.whole


for _sent in (disturb_layer, restore):
    _sent.__module__ = "__main__"  # by value to the worker


def test_the_diagnosis_names_step_version_engine_tokens_and_layer(
    make_config: Callable[..., RunConfig], client_wide: Client
) -> None:
    config = make_config(
        run={"iterations": 5},
        model={"path": "libra/tiny-arithmetic"},
        rollout={"max_new_tokens": 16},
        trainer={"prompts": 4, "group_size": 4, "lr": 1e-4, "mismatch_k3_alarm": 1e-5},
        cluster=WIDE,
    )
    address = address_of(client_wide, "rollout-1")
    client_wide.run(disturb_layer, FIRST, workers=[address])
    try:
        summary = run(config, client=client_wide)
    finally:
        client_wide.run(restore, workers=[address])
    k3 = {name: [row[f"mismatch_k3/{name}"] for row in summary.iterations] for name in ("rollout-0", "rollout-1")}
    assert max(k3["rollout-0"]) < 1e-8 and max(k3["rollout-1"][:FIRST]) < 1e-8
    done = CliRunner().invoke(cli, ["diagnose", str(summary.directory)])
    assert done.exit_code == 1, done.output
    found = diagnose(summary.directory)
    assert (found.first, found.threshold) == (FIRST, 1e-5)
    assert [part.name for part in found.parts if part.name.startswith("engine")] == ["engine rollout-1"]
    assert found.tokens and {token.engine for token in found.tokens} == {"rollout-1"}
    assert all(token.text is not None for token in found.tokens)
    (layer,) = found.layers
    assert (layer.worker, layer.layer, layer.version, layer.loading) == ("rollout-1", LAYER, FIRST, False)
    assert LAYER in done.output
