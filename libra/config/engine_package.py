"""Whether vLLM, which Libra works without, is installed; nothing of it is imported."""

from __future__ import annotations

from importlib.util import find_spec

from libra.errors import EngineError

INSTALL = "type: make setup-vllm (vLLM for CPUs), or on a GPU machine: pip install 'libra-rl[vllm]'"


def is_installed() -> bool:
    """Whether vLLM can be imported; does not import it."""
    return find_spec("vllm") is not None


def check_installed() -> None:
    """EngineError with the line to type if vLLM is missing."""
    if not is_installed():
        raise EngineError(f"rollout.engine: vllm is not installed here; {INSTALL}; or type rollout.engine=transformers")
