"""MetricObjects: the objects of torchmetrics of a module, whose states become arguments and values.

An object of torchmetrics adds up the batches of a validation in its attributes. Under `torch.vmap`
a tensor of many networks must not remain in an attribute. So a call receives the states of the
objects as an argument, and returns the states after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torchmetrics.metric import CompositionalMetric, Metric
from torchmetrics.wrappers.abstract import WrapperMetric

from lit_dps.engines.module_hooks import NeedsLightning

# State variables by name, of each object by its path in the module.
States = dict[str, dict[str, Any]]


def metric_objects(module: nn.Module) -> dict[str, Metric]:
    """Return the objects of torchmetrics in a module, by path."""
    return {path: part for path, part in module.named_modules() if isinstance(part, Metric)}


def _copied(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of an object; its lists are copied, because updates extend them."""
    copies = dict(attributes)
    for name, value in attributes.items():
        if isinstance(value, list):
            copies[name] = list(value)
    return copies


@contextmanager
def begun_metric_objects(module: nn.Module) -> Iterator[None]:
    """Reset the torchmetrics objects for this block, and restore them afterwards.

    Under `torch.vmap` the initial states belong to the networks, because an object adds to them in
    place.
    """
    objects = metric_objects(module)
    before = [(metric, _copied(vars(metric))) for metric in objects.values()]
    try:
        zero = None
        for parameter in module.parameters():
            zero = torch.zeros_like(parameter.detach().flatten()[0])
            break
        for path, metric in objects.items():
            if isinstance(metric, WrapperMetric):
                name = type(module).__name__
                raise NeedsLightning(f"{path} of {name} wraps another torchmetrics object")
            metric._defaults = tree_map(
                lambda default: _of_network(default, zero), dict(metric._defaults)
            )
            for state, default in metric._defaults.items():
                if isinstance(default, list):
                    setattr(metric, state, [])
            metric.reset()
        yield
    finally:
        for metric, attributes in before:
            vars(metric).clear()
            vars(metric).update(attributes)


def _of_network(default: Any, zero: Tensor | None) -> Any:
    """Return an initial state as a tensor of the network whose parameter made `zero`."""
    if not isinstance(default, Tensor) or zero is None:
        return default
    return default.to(zero.device) + zero.to(default.dtype)


@contextmanager
def updated_objects(module: nn.Module) -> Iterator[set[str]]:
    """Yield a set that has, after the block, the paths of the objects that the block updated."""
    updated: set[str] = set()
    with begun_metric_objects(module):
        yield updated
        for path, metric in metric_objects(module).items():
            if metric.update_called:
                updated.add(path)


class MetricObjects:
    """The objects of torchmetrics of a module during a validation.

    Attributes:
        logged: Path of the object that the module logged by a name.
    """

    def __init__(self):
        self.logged: dict[str, str] = {}
        # The networks of a stack have the same batches, so their numbers of updates are the same.
        self._updates: dict[str, int] = {}

    def call(
        self, module: LightningModule, states: States, function: Callable[[], Any]
    ) -> tuple[Any, States]:
        """Call a function while the objects have these states.

        Args:
            module: The module that has the objects.
            states: The states after the call before; empty at the beginning of a validation.
            function: Calls the module.

        Returns:
            The value of the function, and the states after it.
        """
        with begun_metric_objects(module):
            objects = metric_objects(module)
            for path, of_object in states.items():
                for state, value in of_object.items():
                    # An object may change its state in place.
                    setattr(objects[path], state, tree_map(torch.clone, value))
                objects[path]._update_count = self._updates[path]
            value = function()
            after: States = {}
            for path, metric in objects.items():
                self._updates[path] = metric._update_count
                after[path] = {state: getattr(metric, state) for state in metric._defaults}
            return value, after

    def log(self, module: LightningModule, name: str, metric: Metric) -> None:
        """Remember that the module logged an object by a name.

        Raises:
            NeedsLightning: If the module logs another object by this name, or one that it does not
                keep.
        """
        for path, part in metric_objects(module).items():
            if part is metric and self.logged.setdefault(name, path) == path:
                return
        raise NeedsLightning(
            f"{type(module).__name__} logs {name} from torchmetrics objects that change or are "
            "not its attributes"
        )

    def values(self, module: LightningModule) -> dict[str, Tensor]:
        """Return the values of the logged objects, by the names they are logged by.

        Raises:
            NeedsLightning: If the module did not update an object, or its value is no number.
        """
        objects = metric_objects(module)
        values = {}
        for name, path in self.logged.items():
            if not any(part.update_called for part in metric_objects(objects[path]).values()):
                raise NeedsLightning(
                    f"{type(module).__name__} logs {name} from a torchmetrics object that it does "
                    "not update"
                )
            values[name] = objects[path].compute()
        return values

    def unreset(self, module: LightningModule) -> list[str]:
        """Return the paths of objects that keep their states after a validation.

        Lightning resets only objects that the module logs.
        """
        objects = metric_objects(module)
        reset = set()
        for path in self.logged.values():
            reset.update(map(id, metric_objects(objects[path]).values()))
        paths = []
        for path, metric in objects.items():
            # `1 - accuracy` has no state, and does not reset its count of updates.
            has_state = not isinstance(metric, CompositionalMetric)
            if has_state and metric.update_called and id(metric) not in reset:
                paths.append(path)
        return paths
