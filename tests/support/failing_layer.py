"""A fault for one engine: after each passed version check a layer of it is disturbed, more at every version."""

from __future__ import annotations

LAYER = "model.layers.1.mlp.down_proj.weight"


def disturb_layer(first: int, size: float, growth: float) -> None:
    """On a worker: from version ``first`` on, `LAYER` of its engine gets noise of ``size`` x ``growth`` ** (version - first) times
    its root mean square, before the first turn that a version generates. The next load overwrites it."""
    import torch

    from libra.rollout import TransformersEngine

    whole = TransformersEngine.generate

    def disturb(batch, version: int) -> None:
        weight = batch.model.get_parameter(LAYER)
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(version))
        with torch.no_grad():
            weight.add_(noise * weight.square().mean().sqrt() * size * growth ** (version - first))
        batch.forward.weights_changed()

    async def generate(engine, request):
        if engine.version >= first and getattr(engine, "disturbed", -1) < engine.version:
            engine.disturbed = engine.version
            await engine._ask(disturb, engine._open(), engine.version)
        return await whole(engine, request)

    TransformersEngine.generate = generate


disturb_layer.__module__ = "__main__"  # sent to the worker by value, with what it needs
