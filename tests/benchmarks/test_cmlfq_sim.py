"""What `benchmarks.cmlfq_sim` counts, on cells that can be checked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.cmlfq_sim import POLICIES, Cell, figures_of, homogeneous_layouts, interval, mixed_layouts
from libra.policy import ORDERINGS


def cell(oracle: float, cmlfq: float) -> Cell:
    """Three seeds; every other policy is as fast as FIFO."""
    took = {"oracle": oracle, "cmlfq": cmlfq}
    rows = {
        (policy, kind): [100.0 * took.get(policy, 1.0)] * 3
        for policy in POLICIES
        for kind in ("homogeneous", "planned")
    }
    rows["fifo", "homogeneous"] = [100.0] * 3
    return Cell("cell", {2: 8}, {2: 8}, rows, rows)


def test_every_ordering_is_compared() -> None:
    assert set(POLICIES) == set(ORDERINGS)


def test_the_share_counts_only_cells_where_the_oracle_gains() -> None:
    figures = figures_of([cell(0.80, 0.90), cell(0.97, 1.02)])
    assert figures["share_of_oracle_gain"].value == pytest.approx(0.5)
    assert figures["worst_vs_homogeneous_fifo"].value == pytest.approx(1.02)
    assert figures["makespan_over_fifo_cmlfq"].value == pytest.approx((0.90 * 1.02) ** 0.5)
    assert figures["makespan_over_fifo_fifo"].value == 1.0
    assert "share_of_oracle_gain" not in figures_of([cell(0.97, 1.0)])


def test_layouts_use_all_gpus() -> None:
    for gpus in (16, 48, 96):
        for layout in [*homogeneous_layouts(gpus), *mixed_layouts(gpus)]:
            assert sum(tp * count for tp, count in layout.items()) == gpus
        assert len(mixed_layouts(gpus)) == 3


def test_the_interval_holds_the_mean_and_is_the_same_every_time() -> None:
    values = np.random.default_rng(0).normal(1.0, 0.1, 10)
    low, high = interval(values)
    assert low < values.mean() < high and (low, high) == interval(values)
