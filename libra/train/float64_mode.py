"""Float64 throughout: a mode in which a model in float64 does not fall back to float32 anywhere.

transformers computes norms in float32. For a model in float64 that loses half of the digits: gradients of the same tokens then
differ by 1e-8 between two layouts, and nothing finer can be tested.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class KeepDouble(TorchFunctionMode):
    """A mode in which casts of float64 tensors to a narrower floating dtype have no effect."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func``, except for a cast to a narrower dtype."""
        given = dict(kwargs or {})
        if func in (Tensor.to, Tensor.float) and args[0].dtype is torch.float64:
            narrow = func is Tensor.float or torch.float32 in (*args[1:], given.get("dtype"))
            if narrow:
                return args[0]
        return func(*args, **given)


def keep_double(model: Any) -> None:
    """Make every forward pass of ``model``, a float64 model, run in float64 throughout. Experts run one by one: torch's grouped
    products have no float64."""
    if getattr(model.config, "num_experts", 0):
        model.set_experts_implementation("eager")
    forward = model.forward

    @functools.wraps(forward)
    def in_double(*args: Any, **kwargs: Any) -> Any:
        with KeepDouble():
            return forward(*args, **kwargs)

    model.forward = in_double
