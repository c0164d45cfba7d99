"""A GPU that is none: tensors that say they are elsewhere and compute on the CPU, and refuse what a GPU would refuse.

For tests of where tensors are, on machines without a GPU. Inside `pretended_gpu`

* what is made on or moved to the device that it gives is such a tensor, and computes on the CPU, attention by its plain form;
* an operation that mixes one with a tensor of the host raises, but for what CUDA allows: numbers (tensors without axes),
  copies from one to the other, and indices on the host into a tensor on the GPU;
* ``numpy()`` and anything else that reads host memory raises, until ``cpu()`` was asked for.

It says nothing of kernels, memory, streams or speed, and ``torch.cuda`` itself still knows of no GPU. Optimizers are told that they
may fuse there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
"""What the pretended GPU is called: a build of torch for CPUs has guards for the devices ``cpu`` and ``meta`` only. So what uses
``meta`` for its own purposes, as transformers does when it loads a model, has to do so outside."""
_aten = torch.ops.aten
_MIXES = {
    _aten.copy_.default, _aten._to_copy.default, _aten.to.other, _aten.index.Tensor, _aten.index_put_.default,
    _aten.index_put.default, _aten._index_put_impl_.default, _aten.set_.source_Storage,
}  # fmt: skip
"""Operations that CUDA does with tensors of both sides."""


class PretendedTensor(Tensor):
    """A tensor that says it is on the GPU; ``own`` holds its values."""

    own: Tensor

    @staticmethod
    def __new__(cls, own: Tensor) -> PretendedTensor:
        place = {
            "strides": own.stride(),
            "storage_offset": own.storage_offset(),
            "layout": own.layout,
            "device": DEVICE,
        }
        make = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        made = make(cls, own.size(), **place, dtype=own.dtype, requires_grad=False)
        made.own = own
        return made  # type: ignore[no-any-return]

    @property
    def data(self) -> Tensor:
        """As of any tensor; given another tensor, it has that one's values, and shares them."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        assert isinstance(value, PretendedTensor)
        self.own = value.own
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    def data_ptr(self) -> int:
        """That of the values: tied tensors are told by it."""
        return self.own.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        """Refused, as by CUDA."""
        raise TypeError("can't convert the pretended GPU device type tensor to numpy. Use Tensor.cpu() first")

    def tolist(self) -> Any:
        """CUDA copies by itself here."""
        return self.own.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PretendedTensor({self.own!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _computed(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if torch.is_inference_mode_enabled():  # of tensors made in it no views could be taken
        with torch.inference_mode(False), torch.no_grad():
            return _on_own(func, args, kwargs)
    return _on_own(func, args, kwargs)


def _on_own(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = tree_flatten((args, kwargs))[0]
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    there = [leaf for leaf in given if isinstance(leaf, PretendedTensor)]
    asked = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
    to_gpu = bool(there) if asked is None else asked == DEVICE
    here = [leaf for leaf in given if not isinstance(leaf, PretendedTensor) and leaf.dim() > 0]
    if there and here and func not in _MIXES:
        raise RuntimeError(
            f"Expected all tensors to be on the same device: {func} got {tuple(here[0].shape)} on the cpu and "
            f"{tuple(there[0].shape)} on the pretended GPU"
        )
    if func in (_aten.copy_.default, _aten.index_put_.default, _aten._index_put_impl_.default, _aten.index.Tensor):
        to_gpu = isinstance(args[0], PretendedTensor)
    if kwargs.get("pin_memory"):
        kwargs = kwargs | {"pin_memory": False}
    own_args, own_kwargs = tree_map(_own, (args, kwargs))
    result = func(*own_args, **own_kwargs)
    by_own = {id(leaf.own): leaf for leaf in there}

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor) or not to_gpu:
            return value
        return by_own[id(value)] if id(value) in by_own else PretendedTensor(value)

    return tree_map(wrapped, result)


def _own(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.own if isinstance(value, PretendedTensor) else value


@contextmanager
def pretended_gpu() -> Iterator[torch.device]:
    """Within it ``cuda`` is there; the device to name. Other threads see none of it."""
    supported = optimizers._get_fused_kernels_supported_devices
    optimizers._get_fused_kernels_supported_devices = lambda: ["meta"]
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # else tied parameters would be two after ``to``
    try:
        with _Mode():
            yield DEVICE
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        optimizers._get_fused_kernels_supported_devices = supported
