"""A loss, an advantage and a learning rate schedule of your own: ``python workflows/own_loss.py [section.key=value ...]``.

`libra.train.own_parts` has their protocols, with shapes and units; the driver tries each before anything starts.
"""

from __future__ import annotations

import sys

import numpy as np

import libra
from libra.config import typed_settings


def one_sided(logp, old_logp, advantage, *, sequences, settings):
    """Clipped only above: bad tokens may become as unlikely as they like. One loss per token (N,)."""
    ratio = (logp - old_logp).clamp(-20, 20).exp()
    return -advantage * ratio.clamp(max=1 + settings.loss_args.get("clip_high", 0.28))


def ranked(groups, *, settings):
    """The rank of a reward in its group, from -1 to 1, ties averaged: the scale of rewards plays no part."""
    return [np.sign(g.reward[:, None] - g.reward[g.valid]).sum(axis=1) / max(1, g.valid.sum()) for g in groups]


def cosine(step, *, settings):
    """From 1 to 0.1 within 100 steps."""
    return 0.1 + 0.45 * (1 + np.cos(np.pi * min(step / 100, 1.0)))


if __name__ == "__main__":
    settings = {"run__iterations": 5, "trainer__lr": 5e-4} | typed_settings(sys.argv[1:])
    own = {"trainer__loss": one_sided, "trainer__advantage": ranked, "trainer__lr_schedule": cosine}
    print(libra.train(**own, on_iteration=lambda values: print("lr", values["lr"]), **settings))
