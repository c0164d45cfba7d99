"""What a worker does with ``model.path``: a directory, an id that can be fetched, and ids that cannot."""

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from libra.errors import ModelError
from libra.worker.model_files import local_model


@pytest.fixture
def hub(monkeypatch):
    """``hub(answer)``: the hub gives this directory, or raises this error."""

    def answers(answer):
        def download(repo, **options):
            if isinstance(answer, Exception):
                raise answer
            return str(answer)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

    return answers


def test_a_directory_is_itself_and_an_id_is_where_the_hub_put_it(tmp_path, hub):
    assert local_model(str(tmp_path)) == tmp_path
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    hub(tmp_path)
    assert local_model("org/name") == tmp_path


def test_without_a_network_or_a_model_in_the_repository_the_error_names_it(tmp_path, hub):
    hub(LocalEntryNotFoundError("Name or service not known"))
    with pytest.raises(ModelError, match=r"'org/name'.*hf download org/name"):
        local_model("org/name")
    (tmp_path / "config.json").touch()
    hub(tmp_path)
    with pytest.raises(ModelError, match=r"'org/name' lacks \*\.safetensors"):
        local_model("org/name")
