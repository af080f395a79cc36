"""Functional: a module as a function of its parameters and buffers, for many networks at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

# Returns tensors that a module computes of a batch.
Call = Callable[[Any, Any], Any]


class Functional(nn.Module):
    """A module as a function of its parameters and buffers."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, call: str | Call, batch: Any) -> Any:
        if isinstance(call, str):
            return getattr(self.module, call)(batch)
        return call(self.module, batch)

    def call(self, call: str | Call, tensors: Mapping[str, Tensor], batch: Any) -> Any:
        """Call the module with these parameters and buffers, by name.

        Args:
            call: The name of a method that takes a batch, or a function of the module and a batch.
            tensors: The parameters and buffers. The call must not change them.
            batch: The batch.
        """
        with attention_of_stacks():
            return functional_call(self, _named(tensors), (call, batch))

    def call_and_update(
        self,
        call: str | Call,
        tensors: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        batch: Any,
    ) -> tuple[Any, dict[str, Tensor]]:
        """Return the value of a call, and the buffers after it as new tensors.

        Args:
            call: See `call`.
            tensors: The parameters, by name.
            buffers: The buffers, by name. They do not change.
            batch: The batch.
        """
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        named = _named({**tensors, **copies})
        with attention_of_stacks():
            value = functional_call(self, named, (call, batch))
        # `functional_call` stores buffers that the module has replaced in this dict.
        return value, {name: named[f"module.{name}"] for name in buffers}


@contextmanager
def attention_of_stacks() -> Iterator[None]:
    """Compute attention by products and softmax in this block.

    Under `torch.vmap` the fused kernels would compute one network after another.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


def _named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"module.{name}": tensor for name, tensor in tensors.items()}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module, by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


class WithoutDropout(TorchFunctionMode):
    """Turns dropout off within a block. The module stays in training mode.

    Two calls of a module are equal then, if dropout is all that they draw.
    """

    def __torch_function__(
        self,
        func: Callable,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _TRAINING_FUNCTIONS:
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.arguments["training"] = False
            return func(*bound.args, **bound.kwargs)
        if func in (torch.dropout, torch.feature_dropout, torch.alpha_dropout):
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > _ATTENTION_RATE:
                args = (*args[:_ATTENTION_RATE], 0.0, *args[_ATTENTION_RATE + 1 :])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


# Their argument `training` decides on dropout, and on nothing else.
_TRAINING_FUNCTIONS = (
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    F.multi_head_attention_forward,
)
_ATTENTION_RATE = 4  # place of `dropout_p` among the arguments of scaled_dot_product_attention
