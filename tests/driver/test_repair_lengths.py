"""C-MLFQ live on trajectories of very different lengths (workflows/repair_lengths.py): it learns, and re-orders what waits."""

import pytest
from repair_lengths import makespans_s, rewritten, run, settings, skills

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


def test_forecasts_have_skill_and_tool_returns_reorder_what_waits(tmp_path):
    directory = run(settings(tmp_path, "cmlfq", [0.005], 5))
    skill = skills(directory)
    assert max(skill) > 0.01  # one run: 0.02 to 0.05, and up to 0.3
    assert rewritten(directory) > 20  # of 400
    assert len(makespans_s(directory)) == 5 and min(makespans_s(directory)) > 0.0
