"""A key for a scheduler and workers that somebody starts: with its settings they let in only who has it."""

import asyncio

import dask.config
import pytest
import yaml
from distributed import Client, Scheduler, Worker
from distributed.security import Security

from libra.cli.main import main
from libra.cluster.connection import new_security


def test_what_is_started_with_these_settings_requires_the_key(tmp_path, capsys):
    keys = tmp_path / "keys"
    with pytest.raises(SystemExit):
        main(["cluster", "tls", str(keys)])
    assert capsys.readouterr().out == f"export DASK_CONFIG={keys}/dask.yaml\n"
    assert {path.name for path in keys.iterdir()} == {"cert.pem", "key.pem", "dask.yaml"}
    assert keys.stat().st_mode & 0o777 == 0o700
    assert (keys / "key.pem").stat().st_mode & 0o777 == 0o600
    settings = yaml.safe_load((keys / "dask.yaml").read_text())

    async def tried():
        ours = {"asynchronous": True, "set_as_default": False}
        async with Scheduler(port=0, host="127.0.0.1", dashboard_address="127.0.0.1:0") as scheduler:
            assert scheduler.address.startswith("tls://")
            async with (
                Worker(scheduler.address, host="127.0.0.1", dashboard=False) as worker,
                Client(scheduler.address, timeout=30, **ours) as client,
            ):
                assert worker.address.startswith("tls://")
                assert await client.submit(lambda: 5) == 5
                with pytest.raises(OSError):
                    await Client(scheduler.address, timeout=1, security=new_security(), **ours)
                tcp, plain = scheduler.address.replace("tls://", "tcp://"), Security(require_encryption=False)
                with pytest.raises(OSError):
                    await Client(tcp, timeout=1, security=plain, **ours)
                assert await client.submit(lambda: 6) == 6, "and it serves those who have it"

    with dask.config.set(dask.config.merge(dask.config.config, settings)):
        asyncio.run(tried())


def test_a_key_is_not_replaced_unasked(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["cluster", "tls", str(tmp_path)])
    before = (tmp_path / "key.pem").read_text()
    with pytest.raises(SystemExit) as stopped:
        main(["cluster", "tls", str(tmp_path)])
    assert stopped.value.code == 2
    assert "--force" in capsys.readouterr().err
    assert (tmp_path / "key.pem").read_text() == before
