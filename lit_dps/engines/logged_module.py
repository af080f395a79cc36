"""The training loss and the logged metrics of a LightningModule, as functions of a batch.

A stack calls them under `torch.vmap`, without a trainer. What only a trainer has raises
NeedsLightning, so that the module trains in Lightning's loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from lit_dps.engines.functional import Functional
from lit_dps.engines.metric_objects import (
    MetricObjects,
    States,
    begun_metric_objects,
    updated_objects,
)
from lit_dps.engines.module_hooks import NeedsLightning
from lit_dps.module import ImageClassifier
from lit_dps.training.training_pass import loss_of

# Examples that are validated at a time, summed over networks. Simple-CNN needs 80 kB for one.
MAX_EVALUATED = 32_768


class Logged(NamedTuple):
    """A metric that a module logged for a batch.

    Attributes:
        value: Its value.
        weight: Examples that the value counts for; None for the examples of the batch.
    """

    value: Tensor
    weight: int | None


class Unknown:
    """Replaces the number of a training batch, which differs between the networks of a stack.

    Args:
        module: Name of the module's class.
    """

    def __init__(self, module: str):
        self._module = module

    @property
    def __class__(self) -> type:
        return int  # for `isinstance`; a subclass of int would be an index without an error

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._error()

    def _error(self) -> NeedsLightning:
        return NeedsLightning(f"{self._module} uses batch_idx in a training step")


def _raise(self: Unknown, *args: Any) -> Any:
    raise self._error()


_NUMBER_METHODS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg abs "
    "eq ne lt le gt ge bool int float index str format hash"
)
for _method in _NUMBER_METHODS.split():
    setattr(Unknown, f"__{_method}__", _raise)


def training_loss(module: LightningModule, batch: Any, batch_idx: int | None = None) -> Tensor:
    """Return the loss of a batch that the module trains.

    Args:
        module: The module.
        batch: The batch.
        batch_idx: The number of the batch; None if the module must not use it.

    Raises:
        NeedsLightning: If the module returns no loss, or uses an unknown number of the batch.
    """
    if isinstance(module, ImageClassifier):
        return module.loss(batch)
    number: Any = batch_idx
    if batch_idx is None:
        number = Unknown(type(module).__name__)
    with begun_metric_objects(module):  # what a training step adds to them is not read
        loss = loss_of(module, batch, number)
    if not isinstance(loss, Tensor):
        raise NeedsLightning(f"training_step of {type(module).__name__} does not return a loss")
    return loss


def loss_of_pair(module: LightningModule, pair: tuple[Any, Any]) -> Tensor:
    """Return the loss of a training batch that a stack has with the numbers of its examples."""
    if isinstance(module, ImageClassifier):
        return module.loss(pair)
    return training_loss(module, pair[0])


_LOG = inspect.signature(LightningModule.log)


def _record(
    logged: dict[str, Logged],
    module: LightningModule,
    objects: MetricObjects,
    *args: Any,
    **options: Any,
) -> None:
    """Store a logged value; `LightningModule.log` has the arguments after `objects`."""
    class_name = type(module).__name__
    call = _LOG.bind(module, *args, **options)
    call.apply_defaults()
    name, value = call.arguments["name"], call.arguments["value"]
    if call.arguments["on_epoch"] is False:
        raise NeedsLightning(f"{class_name} logs {name} with on_epoch=False")
    if isinstance(value, Metric):
        objects.log(module, name, value)
        return
    if isinstance(value, bool | int | float):
        value = torch.tensor(value, dtype=torch.get_default_dtype())
    if not isinstance(value, Tensor):
        raise NeedsLightning(f"{class_name} logs {name} as {type(value).__name__}")
    if call.arguments["reduce_fx"] not in ("mean", torch.mean):
        raise NeedsLightning(f"{class_name} logs {name} with a reduce_fx other than the mean")
    if name in logged:
        raise NeedsLightning(f"{class_name} logs {name} twice for a batch")
    logged[name] = Logged(_number(class_name, name, value), call.arguments["batch_size"])


def _number(class_name: str, name: str, value: Any) -> Tensor:
    """Return a logged value as a tensor without dimensions."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise NeedsLightning(f"{class_name} logs {name} as a value that is not one number")
    value = value.detach().squeeze()
    if not value.is_floating_point():
        value = value.to(torch.get_default_dtype())
    return value


@contextmanager
def _log_to(module: LightningModule, record: Callable[..., None]) -> Iterator[None]:
    """Call `record` for what a module logs in this block."""
    before = vars(module).get("log")
    vars(module)["log"] = record
    try:
        yield
    finally:
        del vars(module)["log"]
        if before is not None:
            vars(module)["log"] = before


class MeanOverBatches:
    """The means of numbers over the examples of all batches, added up as in Lightning's loop."""

    def __init__(self):
        self._totals: dict[str, Tensor] = {}
        self._examples: dict[str, int] = {}

    def add(self, values: Mapping[str, Tensor], examples: int) -> None:
        """Add the values of a batch, by name, each of shape (rows,) or ()."""
        for name, value in values.items():
            if name not in self._totals:
                self._totals[name] = torch.zeros_like(value, dtype=torch.float32)
                self._examples[name] = 0
            # The total of a float64 metric becomes float64, as in Lightning's loop.
            self._totals[name] = self._totals[name] + value * examples
            self._examples[name] += examples

    def means(self) -> dict[str, Tensor]:
        """Return the mean of each metric by name: float64, shape (rows,) or ()."""
        return {
            name: (total / self._examples[name]).double() for name, total in self._totals.items()
        }


# Calls a function of the module and of the states of its objects, for one network or for many.
Apply = Callable[[Callable[[Any, Any], Any], States], Any]


def validation_metrics(
    apply: Apply, batches: Iterable[tuple[int, Any]], names: Sequence[str]
) -> dict[str, Tensor]:
    """Return the metrics of a validation, by name: float64, shape (rows,) or ().

    Numbers that `validation_step` logs are averaged over the examples. At the end, objects of
    torchmetrics are computed, and `on_validation_epoch_end` is called.

    Args:
        apply: Calls the module of one network, or of many.
        batches: The batches, each with its number.
        names: The metrics.

    Raises:
        NeedsLightning: If Lightning's loop may have another value.
    """
    objects = MetricObjects()
    means = MeanOverBatches()
    states: States = {}
    for number, batch in batches:
        values, states = apply(partial(_step, objects, names, number, batch), states)
        means.add(values, len(tree_leaves(batch)[0]))
    metrics = means.means()
    at_end, _ = apply(partial(_end, objects, names, set(metrics)), states)
    for name, value in at_end.items():
        metrics[name] = value.double()
    return metrics


def _step(
    objects: MetricObjects,
    names: Sequence[str],
    batch_idx: int,
    batch: Any,
    module: LightningModule,
    states: States,
) -> tuple[dict[str, Tensor], States]:
    """Return the numbers among the metrics that `validation_step` logs, and the states after it."""
    logged: dict[str, Logged] = {}

    def call() -> None:
        with _log_to(module, partial(_record, logged, module, objects)):
            _validate_batch(module, batch, batch_idx)

    _, after = objects.call(module, states, call)
    size = len(tree_leaves(batch)[0])
    values = {}
    for name, number in logged.items():
        if name not in names:
            continue
        if number.weight not in (None, size):
            raise NeedsLightning(
                f"{type(module).__name__} logs {name} with batch_size={number.weight} for a batch "
                f"of {size} examples"
            )
        values[name] = number.value
    return values, after


def _validate_batch(module: LightningModule, batch: Any, batch_idx: int) -> None:
    """Call `validation_step` as Lightning does."""
    step: Any = module.validation_step
    if is_param_in_hook_signature(step, "batch_idx", min_args=2):
        step(batch, batch_idx)
    else:
        step(batch)


def _end(
    objects: MetricObjects,
    names: Sequence[str],
    known: set[str],
    module: LightningModule,
    states: States,
) -> tuple[dict[str, Tensor], States]:
    """Return the metrics that are known at the end of a validation, and the states after it.

    Args:
        objects: The objects of torchmetrics.
        names: The metrics.
        known: The metrics that `validation_step` logged as numbers.
        module: The module.
        states: The states after the last batch.
    """
    class_name = type(module).__name__
    logged: dict[str, Logged] = {}

    def call() -> dict[str, Tensor]:
        with _log_to(module, partial(_record, logged, module, objects)):
            module.on_validation_epoch_end()
        values = objects.values(module)
        unreset = objects.unreset(module)
        if unreset:
            raise NeedsLightning(f"{class_name} does not reset {unreset[0]} after a validation")
        return values

    values, after = objects.call(module, states, call)
    metrics = {name: number.value for name, number in logged.items() if name in names}
    for name, value in values.items():
        if name in known or name in metrics:
            raise NeedsLightning(
                f"{class_name} logs {name} both as a number and as a torchmetrics object"
            )
        if name in names:
            metrics[name] = _number(class_name, name, value)
    for name in names:
        if name in known and name in metrics:
            raise NeedsLightning(
                f"{class_name} logs {name} both for a batch and at the end of a validation"
            )
        if name not in known and name not in metrics:
            raise NeedsLightning(f"validation_step of {class_name} does not log {name}")
    return metrics, after


def objects_of_both_steps(
    module: LightningModule, training_batch: Any, validation_batch: Any
) -> list[str]:
    """Return the objects of torchmetrics that training and validation both update, by path.

    In Lightning's loop, the training steps before a validation change its value.
    """
    with updated_objects(module) as in_training:
        loss_of(module, training_batch, batch_idx=0)
    with updated_objects(module) as in_validation, _log_to(module, lambda *args, **kwargs: None):
        _validate_batch(module, validation_batch, batch_idx=0)
    return sorted(in_training & in_validation)


def metrics_of_rows(
    functional: Functional,
    tensors_of_rows: Callable[[Tensor], Mapping[str, Tensor]],
    rows: Tensor,
    batches: Sequence[tuple[int, Any]],
    names: Sequence[str],
) -> Mapping[str, Tensor]:
    """Return the metrics of rows, by name: float64, shape (rows,).

    Args:
        functional: The module, in evaluation mode.
        tensors_of_rows: Returns the parameters and buffers of some rows, by name.
        rows: Numbers of the rows.
        batches: The batches of the validation split, each with its number.
        names: The metrics.
    """
    parts = []
    largest = max(len(tree_leaves(batch)[0]) for _, batch in batches)
    for some in rows.split(max(1, MAX_EVALUATED // largest)):
        tensors = tensors_of_rows(some)

        def apply(
            function: Callable, states: States, tensors: Mapping[str, Tensor] = tensors
        ) -> Any:
            over_rows = vmap(
                lambda of_row, row_states: functional.call(function, of_row, row_states)
            )
            return over_rows(tensors, states)

        parts.append(validation_metrics(apply, batches, names))
    return {name: torch.cat([part[name] for part in parts]) for name in names}
