"""Workloads whose samples are alike within a group."""

import pytest

from benchmarks.draws import draw_alike
from libra.errors import ConfigError
from libra.sim.workload import Trace, TurnPlan, draw


def test_kin_have_lengths_like_each_other():
    traces = [Trace(f"t{i}", 10, (TurnPlan(i + 1, "", "", 0, 0.0),)) for i in range(1000)]

    def spread(kinship):
        plans = draw_alike(traces, num_groups=100, group_size=4, seed=0, kinship=kinship).trajectories
        groups = [[plan.new_tokens for plan in plans[i : i + 4]] for i in range(0, 400, 4)]
        return sum(max(group) - min(group) for group in groups) / len(groups)

    assert spread(0.9) < 0.6 * spread(0.3) < 0.6 * spread(0.0)


def test_without_kinship_it_is_a_draw_and_spare_samples_change_no_other():
    traces = [Trace(f"t{i % 10}", 10, (TurnPlan(i + 1, "", "", 0, 0.0),)) for i in range(50)]
    plain = draw(traces, num_groups=3, group_size=4, seed=1, iterations=2)
    assert draw_alike(traces, num_groups=3, group_size=4, seed=1, iterations=2) == plain
    more = draw_alike(traces, num_groups=3, group_size=4, seed=1, iterations=2, spare=2).trajectories
    assert [plan for plan in more if plan.sample < 4] == list(plain.trajectories) and len(more) == 36
    with pytest.raises(ConfigError, match="earlier"):
        draw_alike(traces, num_groups=1, group_size=2, seed=0, earlier=0.8)
