"""The import arrows of the design: who may know whom."""

from __future__ import annotations

from collections.abc import Callable
from graphlib import TopologicalSorter
from pathlib import Path

import picture
import pytest
from import_graph import room, room_graph

Imports = Callable[..., list[tuple[int, str]]]

FOUNDATION = {
    "types", "errors", "untrusted", "keys", "facts", "config", "hardware", "seals", "processes",
}  # fmt: skip
"""Value types, errors, names and settings: everybody may import these."""

ALLOWED: dict[str, set[str]] = {
    "policy": FOUNDATION,
    "planner": FOUNDATION,
    "rollout": FOUNDATION | {"model_loader", "tensors", "projections", "heads", "experts"},
    "train": FOUNDATION | {"model_loader", "named_parts", "transport", "tensors", "tensor_files", "heads", "experts"},
    "weights": FOUNDATION | {"transport", "tensors", "tensor_files", "projections"},
    "store": FOUNDATION | {"tensors", "tensor_files"},
    "transport": FOUNDATION,
    "envs": FOUNDATION | {"named_parts"},
    "agents": FOUNDATION,
    "types": set(),
    "errors": set(),
    "named_parts": {"errors"},
    "model_loader": {"errors", "named_parts"},
    "user_orderings": {"errors", "facts", "named_parts", "policy", "types"},
    "untrusted": {"types"},
    "processes": {"errors"},
    "keys": {"errors"},
    "config": {"errors", "keys", "types", "hardware"},
    "tensors": {"errors", "types", "tensor_files"},
    "tensor_files": {"seals"},
    "seals": set(),
    "projections": set(),
    "heads": {"errors"},
    "experts": {"errors"},
}
"""What each part may import of Libra beside itself; a part that is not listed may import what `FORBIDDEN` leaves."""

FORBIDDEN: dict[str, set[str]] = {
    "scheduler": {"sim", "cli", "api", "driver", "graph", "worker", "rollout", "train", "weights", "envs"},
    "sim": {"scheduler", "cli", "api", "driver", "graph", "worker"},
    "driver": {"cli", "api", "sim"},
    "graph": {"cli", "api", "sim", "driver", "scheduler", "cluster", "observe"},
    "worker": {"cli", "api", "sim", "driver", "graph", "scheduler", "observe", "planner"},
    "observe": {"cli", "api", "driver", "graph", "worker", "rollout", "train", "weights", "envs", "scheduler"},
    "cluster": {"cli", "api", "driver", "graph", "worker", "rollout", "train", "weights", "store", "envs", "scheduler"},
}

IMPURE = {
    "time", "random", "os", "asyncio", "logging", "dask", "distributed", "torch", "threading", "subprocess", "socket",
}  # fmt: skip
PURE_PARTS = {"policy", "planner"}


def violations(source: str, module: str, imports_of: Imports) -> list[str]:
    """What ``source``, which is ``module`` (``libra.part...``), imports against the arrows."""
    part = module.split(".")[1] if "." in module else ""
    found = []
    for line, name in imports_of(source, module, package=False):
        root, *rest = name.split(".")
        if root == "libra":
            target = rest[0] if rest else ""
            if target == part:
                continue
            if part in ALLOWED and target not in ALLOWED[part]:
                found.append(f"{module}:{line} imports {name}; {part} may import {', '.join(sorted(ALLOWED[part]))}")
            elif target in FORBIDDEN.get(part, ()):
                found.append(f"{module}:{line} imports {name}; {part} must not know {target}")
        elif part in PURE_PARTS and root in IMPURE:
            found.append(f"{module}:{line} imports {name}; {part} is pure: time and randomness arrive from outside")
    return found


def test_every_module_follows_the_arrows(modules: dict[str, Path], imports_of: Imports) -> None:
    found = [text for name, path in modules.items() for text in violations(path.read_text(), name, imports_of)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("module", "source"), [
    ("libra.policy.ordering", "import time"),
    ("libra.policy.ordering", "def late():\n    from random import Random"),
    ("libra.policy.ordering", "import dask.config"),
    ("libra.policy.ordering", "import torch.nn as nn"),
    ("libra.policy.ordering", "from libra.store import record"),
    ("libra.planner.split", "from libra.scheduler.plugin import LibraPlugin"),
    ("libra.scheduler.plugin", "import libra.sim.clock"),
    ("libra.sim.clock", "from libra import scheduler"),
    ("libra.rollout.engine", "from libra.train import Replica"),
    ("libra.train.step", "from ..weights import WeightStore"),
    ("libra.weights.store", "from libra.worker.run_spec import RunSpec"),
    ("libra.store.record_codec", "from libra.scheduler.queue import ParkedQueue"),
    ("libra.envs.tool", "if TYPE_CHECKING:\n    from libra.rollout import RolloutEngine"),
    ("libra.transport.channel", "from libra.worker.run_spec import RunSpec"),
    ("libra.types", "from libra.keys import make"),
    ("libra.driver.run_session", "from libra.cli.main import main"),
    ("libra.graph.iteration", "from libra.driver.run_session import Session"),
    ("libra.worker.runtime", "from libra.graph.training_nodes import step"),
])  # fmt: skip
def test_a_violation_is_caught(module: str, source: str, imports_of: Imports) -> None:
    assert len(violations(source, module, imports_of)) == 1


@pytest.mark.parametrize(("module", "source"), [
    ("libra.policy.ordering", "import numpy as np\nfrom libra.types import Phase\nfrom libra.policy.phase_queue import OpenGate"),
    ("libra.policy.ordering", "from .messages import OpenGate"),
    ("libra.worker.runtime", "from libra.rollout import RolloutEngine\nfrom libra.train import Replica\nimport time"),
    ("libra.store.trajectory_journal", "import os\nfrom libra import keys"),
])  # fmt: skip
def test_what_the_design_allows_is_allowed(module: str, source: str, imports_of: Imports) -> None:
    assert violations(source, module, imports_of) == []


def test_no_modules_and_no_rooms_import_each_other(graph: dict[str, set[str]]) -> None:
    """Imports in functions and under TYPE_CHECKING included; the error names the circle."""
    for each in (graph, room_graph(graph)):
        TopologicalSorter(each).prepare()


def test_every_room_is_in_the_picture(modules: dict[str, Path]) -> None:
    described = {name for contents in picture.LAYERS.values() for name in contents}
    assert {room(name) for name in modules} - {"libra"} <= described
