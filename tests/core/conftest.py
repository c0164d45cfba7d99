"""One finished run that several tests read: four tool statuses beside "ok", NaN rewards, the staleness bound 1."""

import pytest

import factories


@pytest.fixture(scope="session")
def finished(client, random_model, tmp_path_factory):
    """Six iterations of two groups of six in `troubled.Troubled`, with evaluations and a checkpoint of each version."""
    from libra.config import config_from_dict
    from libra.driver.run_session import run

    settings = factories.run_settings(
        tmp_path_factory.mktemp("finished"), random_model, run={"iterations": 6, "eta": 1},
        environment={"name": "troubled:Troubled"}, rollout={"max_context_tokens": 512}, trainer={"group_size": 6},
        evaluation={"prompts": 2}, store={"keep_versions": 9},
    )  # fmt: skip
    return run(config_from_dict(settings), client=client)


@pytest.fixture
def worker_address(client):
    from libra.cluster.connection import present_workers

    def address(name: str) -> str:
        (found,) = (address for address, worker in present_workers(client).items() if worker["name"] == name)
        return found

    return address
