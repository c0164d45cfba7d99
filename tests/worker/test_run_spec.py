"""The run's secret is in nothing that is pickled for an open line."""

import pickle

import pytest
from distributed.protocol.pickle import dumps

from libra.errors import ClusterError
from libra.worker.run_spec import SECRET_FILE, RunSpec, forget_secret, sendable_spec, with_secret
from libra.worker.runtime import WorkerRuntime

SECRET = "5ec2e7" * 10
PEERS = [
    {"trainer": {"dispatch": "peer"}}, {"weights": {"transfer": "peer"}}, {"cluster": {"hybrid_workers": 1}},
    {"cluster": {"train_workers": 2}}, {"rollout": {"kv_host_gib": 0.1}},
]  # fmt: skip


def spec_of(config, directory):
    return RunSpec("demo", 0, directory, "model", config, secret=SECRET)


@pytest.mark.parametrize("sections", PEERS)
def test_over_an_open_line_it_goes_through_a_file_of_its_owner(make_config, tmp_path, sections):
    sent, path = sendable_spec(spec_of(make_config(**sections), tmp_path), "tcp://10.0.0.1:8786")
    assert path == tmp_path / SECRET_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    pickled = dumps(WorkerRuntime(sent, path))
    assert SECRET.encode() not in pickled
    assert SECRET not in repr(sent)
    host = pickle.loads(pickled)
    assert with_secret(host.spec, host.secret_file).secret == SECRET
    forget_secret(tmp_path)
    with pytest.raises(ClusterError):
        with_secret(host.spec, host.secret_file)


def test_a_run_that_needs_none_leaves_none(make_config, tmp_path):
    sent, path = sendable_spec(spec_of(make_config(), tmp_path), "tcp://10.0.0.1:8786")
    assert (sent.secret, path) == ("", None)
    assert not (tmp_path / SECRET_FILE).exists()


def test_over_an_encrypted_line_it_is_sent(make_config, tmp_path):
    spec = spec_of(make_config(weights={"transfer": "peer"}), tmp_path)
    for scheduler in ("tls://10.0.0.1:8786", "inproc://10.0.0.1/7/1"):
        assert sendable_spec(spec, scheduler) == (spec, None)
    assert not (tmp_path / SECRET_FILE).exists()
