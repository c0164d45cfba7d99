import asyncio
from types import SimpleNamespace

import pytest

from libra.errors import ServiceFault, ServiceTimeout
from libra.graph import rollout_nodes


def test_a_group_that_is_not_scored_in_time_ends_no_run(tmp_path, monkeypatch, caplog):
    faults = [ServiceTimeout("service teach: a batch of 4 did not return within 600 s"), ServiceFault("out of memory")]

    async def scored(*_):
        raise faults.pop(0)

    host = SimpleNamespace(spec=SimpleNamespace(groups_dir=tmp_path))
    monkeypatch.setattr(rollout_nodes, "runtime_here", lambda run: host)
    monkeypatch.setattr(rollout_nodes, "read_group", lambda path: [])
    monkeypatch.setattr(rollout_nodes, "_scored", scored)
    assert asyncio.run(rollout_nodes.teach("demo", None, 3, 7))["group"] == 7
    assert "group 7 of iteration 3" in caplog.text
    with pytest.raises(ServiceFault, match="out of memory"):
        asyncio.run(rollout_nodes.teach("demo", None, 3, 8))
