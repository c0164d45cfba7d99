"""The digest of files without torch is the digest of the tensors in them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from libra.tensor_files import CHUNK_BYTES, tensors_digest
from libra.tensors import digest

DTYPES = (torch.float16, torch.int64, torch.bool, torch.uint8, torch.float64)
TENSORS = {
    "b": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "a": torch.randn(5, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0)),
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 4),
    **{str(dtype): torch.arange(3).to(dtype) for dtype in DTYPES},
}


def test_files_have_the_digest_of_their_tensors(tmp_path):
    save_file(TENSORS, tmp_path / "one.safetensors", metadata={"format": "pt"})
    assert tensors_digest([tmp_path / "one.safetensors"]) == digest(TENSORS)
    old = {"a": torch.arange(3)}  # runs from before have BLAKE2b over labels and elements in one pass in their manifests
    save_file(old, tmp_path / "old.safetensors")
    assert digest(old, like="0" * 32) == "885d3f9bd90d3bcc7f664ade86d675b8"
    assert tensors_digest([tmp_path / "old.safetensors"], like="0" * 32) == "885d3f9bd90d3bcc7f664ade86d675b8"
    halves = ({name: TENSORS[name] for name in ("a", "b")}, {name: TENSORS[name] for name in ("scalar", "long")})
    for number, half in enumerate(halves):
        save_file(half, tmp_path / f"half{number}.safetensors")
    paths = [tmp_path / "half0.safetensors", tmp_path / "half1.safetensors"]
    assert tensors_digest(paths) == digest(halves[0] | halves[1])


@pytest.mark.parametrize("cut", [0, 40, -1])
def test_a_torn_file_is_a_value_error(tmp_path, cut):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError):
        tensors_digest([path])


def test_every_byte_of_a_tensor_of_several_chunks_counts():
    """The last byte of the first chunk, the first of the second, and the last of all; and chunks have an order."""
    size = 2 * CHUNK_BYTES + 5
    tensor = torch.arange(size, dtype=torch.int64).remainder(251).to(torch.uint8)
    found = {digest({"a": tensor})}
    for place in (CHUNK_BYTES - 1, CHUNK_BYTES, size - 1):
        other = tensor.clone()
        other[place] += 1
        found.add(digest({"a": other}))
    found.add(digest({"a": torch.cat([tensor[CHUNK_BYTES : 2 * CHUNK_BYTES], tensor[:CHUNK_BYTES], tensor[-5:]])}))
    assert len(found) == 5
