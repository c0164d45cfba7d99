"""An inference engine of your own: ``python workflows/own_engine.py [section.key=value ...]``.

This one is the transformers engine with a cache of greedy answers. `libra.rollout.engine.RolloutEngine` is the whole interface;
`libra.testing.engines.EngineContract` tests an engine, and every run verifies each version that it serves.
"""

from __future__ import annotations

import sys

import libra
from libra.config import typed_settings
from libra.rollout.transformers_engine import TransformersEngine


class RemembersGreedy(TransformersEngine):
    """Answers a greedy request that it has had before, under the same weights, from memory."""

    def __init__(self, model_dir, *, slots, max_context_tokens, version, **options):
        super().__init__(model_dir, slots=slots, max_context_tokens=max_context_tokens, version=version, **options)
        self.known = {}

    async def generate(self, request):
        if request.temperature > 0:
            return await super().generate(request)
        asked = (self.version, request.max_new_tokens, request.context_ids.tobytes())
        if asked not in self.known:
            self.known[asked] = await super().generate(request)
        return self.known[asked]


if __name__ == "__main__":
    settings = {"run__iterations": 5, "trainer__lr": 5e-4, "evaluation__prompts": 32, "evaluation__temperature": 0.0}
    settings |= typed_settings(sys.argv[1:])
    print(libra.train(rollout__engine=RemembersGreedy, **settings))
