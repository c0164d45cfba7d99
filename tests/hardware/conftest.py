"""Profiles made of the forms themselves, so that what a fit should find is known."""

import numpy as np
import pytest

from libra.hardware import Efficiencies, load_gpu, load_shape
from libra.hardware.operators import GEMMS, MOVES, operator_s
from libra.hardware.profiles import AttentionProfile, Curve, LinearProfile
from libra.hardware.rooflines import attention_decode_s, attention_prefill_s


@pytest.fixture
def gpu():
    return load_gpu("A100-80G")


@pytest.fixture
def shape():
    return load_shape("Llama-2-7b")


@pytest.fixture
def linear_profile(gpu, shape):
    """A profile whose seconds are the forms' with ``eff``, times ``factor``."""

    def make(eff=None, *, factor=1.0, tps=(1, 2)):
        eff = eff or Efficiencies()
        tokens = np.unique(np.geomspace(1, 4096, 40).astype(int)).astype(float)
        curves = tuple(
            Curve(operator, tp, tokens, factor * operator_s(gpu, eff, shape, tp, operator, tokens))
            for tp in tps
            for operator in GEMMS + MOVES
        )
        return LinearProfile("compute_a100_made_mlp.csv", gpu.name, shape, curves)

    return make


@pytest.fixture
def attention_profile(gpu, shape):
    """Likewise for attention, with ``on`` the GPU whose forms are used."""

    def make(on=None, *, factor=1.0):
        sheet, eff = on or gpu, Efficiencies()
        num, context = (grid.ravel() for grid in np.meshgrid([1.0, 4.0, 16.0, 64.0], np.arange(256.0, 4096.0, 128.0)))
        decode = factor * attention_decode_s(sheet, eff, num, num * context, 4.0 * 32 * 128)
        new, past = (grid.ravel() for grid in np.meshgrid(np.arange(128.0, 1024.0, 64.0), [0.0, 512.0, 1024.0]))
        prefill = factor * attention_prefill_s(sheet, eff, new, past, 32.0, 128)
        return AttentionProfile(
            source="made_attention.csv", gpu=gpu.name, shape=shape, tp=1, heads=32.0, kv_heads=32.0, head_dim=128,
            decode=np.column_stack([num, context, decode]), prefill=np.column_stack([new, past, prefill]), uneven=0,
        )  # fmt: skip

    return make
