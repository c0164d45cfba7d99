"""Every function of the algorithm library is used by runs, or the page of algorithms says that it is not and why."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from libra.config import config_from_dict
from libra.train import TrainSettings, advantages, corrections, losses
from tests.train.test_golden import GOLDEN

REACHED = {
    "verl_adv_grpo": {"advantage": "grpo"},
    "verl_adv_rloo": {"algorithm": "rloo"},
    "verl_adv_reinforce_pp": {"algorithm": "reinforce_pp", "gamma": 0.99},
    "verl_adv_reinforce_pp_baseline": {"algorithm": "reinforce_pp_baseline"},
    "verl_adv_remax": {"algorithm": "remax"},
    "verl_policy_loss_ppo_dual_clip": {"loss": "ppo", "dual_clip": 3.0},
    "verl_policy_loss_gspo": {"algorithm": "gspo"},
    "verl_policy_loss_cispo": {"algorithm": "cispo"},
    "verl_agg_loss": {"aggregation": "seq-mean-token-sum-norm", "loss_divisor": 100.0},
    "verl_kl_penalty": {"kl_coef": 0.1, "kl_estimator": "k2+"},
    "verl_truncated_is": {"old_logp": "proximal", "correction": "truncate", "correction_level": "sequence"},
    "trl_grpo_losses": {"algorithm": "vespo"},
    "trl_grpo_options": {"ratio_max": 4.0, "off_policy_threshold": 0.1, "entropy_coef": 0.01},
    "areal_decoupled_ppo": {"algorithm": "ppo_decoupled", "reject": "ratio", "reject_high": 5.0},
}
"""By the name of a file of recorded cases, keys of ``trainer`` with which a run computes what it compares."""
LIBRARY_ONLY = {"verl_gae": "gae", "verl_value_loss": "value_loss"}
"""Files of recorded cases of functions that no run uses, and the function."""


def not_offered(repository: Path) -> dict[str, str]:
    """Functions that the page says no run offers, by name, and why."""
    page = (repository / "docs/algorithms.md").read_text().partition("## What a run does not offer")[2]
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| `libra")]
    return {name.rpartition(".")[2]: row[1].strip() for row in rows for name in re.findall(r"`(libra[\w.]+)`", row[0])}


def used_in_runs(repository: Path) -> set[str]:
    """Names that modules of Libra refer to, the peers' conventions and the packages' lists of names left out."""
    found: set[str] = set()
    for path in (repository / "libra").rglob("*.py"):
        if "peers" in path.parts or path.name == "__init__.py":
            continue
        tree = ast.parse(path.read_text())
        found |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        found |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return found


def test_recorded_cases_are_reached_by_a_configuration_or_listed_as_library_only(repository: Path) -> None:
    assert set(REACHED) | set(LIBRARY_ONLY) == set(GOLDEN) and not set(REACHED) & set(LIBRARY_ONLY)
    for keys in REACHED.values():
        TrainSettings.of_run(config_from_dict({"trainer": keys}))
    assert set(LIBRARY_ONLY.values()) <= set(not_offered(repository))


def test_every_function_of_the_library_is_used_by_runs_or_listed_with_the_reason(repository: Path) -> None:
    listed, used = not_offered(repository), used_in_runs(repository)
    functions = {
        name for module in (advantages, losses, corrections) for name in module.__all__ if name[0].islower()
    }  # fmt: skip
    assert functions - used == set(listed), "neither used nor listed, or listed and used"
    assert all(listed.values())
