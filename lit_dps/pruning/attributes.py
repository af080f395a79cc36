"""What a module keeps beside its parameters, buffers and submodules: values of attributes, however
deep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor, nn

LONG = 1000  # a longer list is one of examples
_PARTS = ("_parameters", "_buffers", "_modules")


def attributes_of(*owners: Any) -> Iterator[tuple[str, Any]]:
    """The values that objects keep as attributes, in lists and dicts, or in such objects in turn,
    each with its path.

    A list of networks goes as `teacher.0.weight`, a dict of tensors as `shadow.0.weight`. The
    parameters of modules are among the values, the trainer is not.
    """
    queue: list[tuple[str, Any]] = [("", owner) for owner in owners]
    seen: dict[int, Any] = {}  # by id, which keeps them alive meanwhile
    for path, item in queue:  # grows on the way
        if id(item) in seen or isinstance(item, (Trainer, type, ModuleType, FunctionType)):
            continue
        seen[id(item)] = item
        if isinstance(item, dict):
            inner = item
        elif isinstance(item, (list, tuple)):
            inner = dict(enumerate(item))
        elif isinstance(item, nn.Module):
            own = {name: value for name, value in vars(item).items() if name not in _PARTS}
            inner = own | {
                name: value for part in _PARTS for name, value in vars(item)[part].items()
            }
        elif isinstance(item, Tensor) or not hasattr(item, "__dict__"):
            yield path, item
            continue
        else:
            inner = vars(item)
        if len(inner) <= LONG:
            queue.extend(
                (f"{path}.{name}" if path else str(name), value) for name, value in inner.items()
            )


def hidden_tensors(
    network: nn.Module, keepers: Mapping[str, Any] | None = None
) -> dict[str, Tensor]:
    """Tensors of real numbers that a network keeps, which are none of its parameters and buffers,
    by their path.

    Args:
        network: The network.
        keepers: Further objects that may keep tensors, by the name that their paths begin with.
    """
    registered = {id(t) for t in (*network.parameters(), *network.buffers())}
    found = (
        (path, value)
        for path, value in attributes_of(network, keepers or {})
        if isinstance(value, Tensor)
    )
    return {path: t for path, t in found if id(t) not in registered and t.is_floating_point()}
