"""The training loss and the logged metrics of a LightningModule, as functions of a batch.

A stack calls them under `torch.vmap`, without a trainer. What only a trainer has raises
NeedsLightning, so that the module trains in Lightning's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves

from lit_dps.engines.functional import Functional
from lit_dps.engines.module_hooks import NeedsLightning
from lit_dps.module import ImageClassifier
from lit_dps.training.training_pass import loss_of

# Examples that a check evaluates at a time, summed over networks. Simple-CNN needs 80 kB for one.
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
    loss = loss_of(module, batch, number)
    if not isinstance(loss, Tensor):
        raise NeedsLightning(f"{type(module).__name__} returns no loss of a batch")
    return loss


def loss_of_pair(module: LightningModule, pair: tuple[Any, Any]) -> Tensor:
    """Return the loss of a training batch that a stack has with the numbers of its examples."""
    if isinstance(module, ImageClassifier):
        return module.loss(pair)
    return training_loss(module, pair[0])


def metrics_call(names: Sequence[str], batch_idx: int) -> Callable[[Any, Any], list[Tensor]]:
    """Return the function of a module and a batch that returns the metrics of these names."""
    return partial(_metrics_of, names=names, batch_idx=batch_idx)


def _metrics_of(
    module: LightningModule, batch: Any, names: Sequence[str], batch_idx: int
) -> list[Tensor]:
    logged = logged_metrics(module, batch, batch_idx)
    size = len(tree_leaves(batch)[0])
    values = []
    for name in names:
        if name not in logged:
            raise NeedsLightning(f"validation_step of {type(module).__name__} does not log {name}")
        metric = logged[name]
        if metric.weight not in (None, size):
            raise NeedsLightning(
                f"{type(module).__name__} logs {name} with batch_size={metric.weight} for a batch "
                f"of {size} examples"
            )
        values.append(metric.value)
    return values


def logged_metrics(module: LightningModule, batch: Any, batch_idx: int) -> dict[str, Logged]:
    """Return what `validation_step` logs for a batch, by name.

    Raises:
        NeedsLightning: If it logs what is no mean over batches.
    """
    step: Any = module.validation_step
    logged: dict[str, Logged] = {}
    with _log_to(module, partial(_record, logged, type(module).__name__)):
        if is_param_in_hook_signature(step, "batch_idx", min_args=2):
            step(batch, batch_idx)
        else:
            step(batch)
    return logged


def _record(
    logged: dict[str, Logged],
    module: str,
    name: str,
    value: Any,
    prog_bar: bool = False,
    logger: bool | None = None,
    on_step: bool | None = None,
    on_epoch: bool | None = None,
    reduce_fx: Any = "mean",
    enable_graph: bool = False,
    sync_dist: bool = False,
    sync_dist_group: Any = None,
    add_dataloader_idx: bool = True,
    batch_size: int | None = None,
    metric_attribute: str | None = None,
    rank_zero_only: bool = False,
) -> None:
    """Store a logged value; the arguments after `module` are those of `LightningModule.log`."""
    if isinstance(value, bool | int | float):
        value = torch.tensor(value, dtype=torch.get_default_dtype())
    if not isinstance(value, Tensor):
        raise NeedsLightning(f"{module} logs {name} as {type(value).__name__}")
    if on_epoch is False:
        raise NeedsLightning(f"{module} logs {name} with on_epoch=False")
    if reduce_fx not in ("mean", torch.mean):
        raise NeedsLightning(f"{module} logs {name} with a reduce_fx that is no mean")
    if name in logged:
        raise NeedsLightning(f"{module} logs {name} twice for a batch")
    value = value.detach().squeeze()
    if value.ndim:
        raise NeedsLightning(f"{module} logs {name} as several numbers")
    if not value.is_floating_point():
        value = value.to(torch.get_default_dtype())
    logged[name] = Logged(value, batch_size)


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
    """The mean of metrics over the examples of all batches, added up as in Lightning's loop.

    Args:
        names: The metrics.
    """

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._totals: list[Tensor] = []
        self._examples = 0

    def add(self, values: Sequence[Tensor], examples: int) -> None:
        """Add the values of a batch, each of shape (rows,)."""
        if not self._totals:
            self._totals = [torch.zeros_like(value, dtype=torch.float32) for value in values]
        for i, value in enumerate(values):
            # The total of a float64 metric becomes float64, as in Lightning's loop.
            self._totals[i] = self._totals[i] + value * examples
        self._examples += examples

    def means(self) -> Mapping[str, Tensor]:
        """Return the mean of each metric by name: float64, shape (rows,)."""
        return {
            name: (total / self._examples).double()
            for name, total in zip(self._names, self._totals, strict=True)
        }


def metrics_of_rows(
    functional: Functional,
    tensors_of_rows: Callable[[Tensor], Mapping[str, Tensor]],
    rows: Tensor,
    batches: Sequence[Any],
    names: Sequence[str],
) -> Mapping[str, Tensor]:
    """Return the means of metrics over all batches, by name: float64, shape (rows,).

    Args:
        functional: The module, in evaluation mode.
        tensors_of_rows: Returns the parameters and buffers of some rows, by name.
        rows: Numbers of the rows.
        batches: The batches of the validation split.
        names: The metrics.
    """
    means = MeanOverBatches(names)
    for number, batch in enumerate(batches):
        call = metrics_call(names, number)
        over_rows = vmap(lambda tensors, c=call, b=batch: functional.call(c, tensors, b))
        size = len(tree_leaves(batch)[0])
        parts = []
        for some in rows.split(max(1, MAX_EVALUATED // size)):
            parts.append(over_rows(tensors_of_rows(some)))
        means.add([torch.cat(values) for values in zip(*parts, strict=True)], size)
    return means.means()
