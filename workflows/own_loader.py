"""A model built by your own loader: ``python workflows/own_loader.py [section.key=value ...]``

This one freezes the embedding, so that nothing but the layers is trained. A loader may as well register an architecture that
transformers does not know, or patch a tokenizer; `libra.model_loader.ModelLoader` is the whole interface.
"""

from __future__ import annotations

import sys

import libra
from libra.config import typed_settings
from libra.model_loader import PretrainedLoader


class FrozenEmbedding(PretrainedLoader):
    """transformers' own loading, without a gradient for the embedding."""

    def model(self, directory, *, dtype, attention):
        model = super().model(directory, dtype=dtype, attention=attention)
        model.get_input_embeddings().requires_grad_(False)
        return model


if __name__ == "__main__":
    settings = {"run__iterations": 5, "trainer__lr": 5e-4, "evaluation__prompts": 32}
    settings |= typed_settings(sys.argv[1:])
    print(libra.train(model__loader=FrozenEmbedding, **settings))
