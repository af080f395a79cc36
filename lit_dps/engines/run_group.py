"""RunGroup: what runs that train together share, and how they are checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lit_dps.core.attempt import Attempt
from lit_dps.core.trial import STACKED
from lit_dps.data import ImageData
from lit_dps.engines.eligible import Functional, optimizer_of, tensors_of
from lit_dps.engines.engine import Training
from lit_dps.engines.network_run import NetworkRun
from lit_dps.module import ImageClassifier
from lit_dps.optim import rule_of
from lit_dps.training.early_check import Check, HardestFirst
from lit_dps.training.hidden_state import unchanged_attributes
from lit_dps.training.stopwatch import Stopwatch
from lit_dps.training.workload import Built

# Examples whose loss shows whether two modules differ in more than their weights.
COMPARED_EXAMPLES = 64
# Relative tolerance of that loss in float64. A penalty of weight 1e-6 changes it by 1e-5.
LOSS_TOLERANCE = 1e-9


class NetworkBatch(Protocol):
    """The networks that train together, one a row: `SingleNetwork` or `StackedNetworks`.

    Attributes:
        runs: The run of each row; None if the row is empty.
        live: The rows that are not empty.
    """

    runs: list[NetworkRun | None]

    @property
    def live(self) -> Sequence[int]: ...

    def train(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Take optimizer steps; return the loss of each row at the last step, before its update.

        Args:
            x, y: Images and classes of the training split.
            index: Examples of each step: (steps, batch), or (steps, rows, batch) if rows differ.
        """
        ...

    def finite(self) -> list[bool]:
        """Return for each row whether all weights are finite."""
        ...

    def write_back(self, row: int) -> None:
        """Copy the state of a row into the module, optimizer and schedule of its run."""
        ...

    def per_example_error(self, rows: Tensor, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Return the module's error of each example, shape (rows, examples) like `index`."""
        ...

    def losses(self, rows: Tensor, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Return the loss of each row summed over examples: float64, shape (rows,)."""
        ...


class RunGroup:
    """What runs that train together share: data on the device, checks, and the order of batches.

    Args:
        training: The settings of the study.
        built: The first trial of the group, with its data set up.
        device: Where the networks are trained.
        stack_size: Networks that train together, at most.

    Attributes:
        x, y: Images and classes of the training split, on the device.
        interval: Optimizer steps between two checks.
        watch: Seconds of steps and of checks.
    """

    def __init__(self, training: Training, built: Built, device: torch.device, stack_size: int):
        assert isinstance(built.data, ImageData)
        self.training = training
        self.device = device
        self.stack_size = stack_size
        self.interval = training.goal.check_interval
        self.watch = Stopwatch()
        self.x, self.y = built.data.on_device("train", device)
        self._validation = built.data.on_device("val", device)
        self._early_reject = training.goal.stops_checks_early
        self._data = built.data
        self._module = built.module
        self._kind = _kind_of(built)

    @torch.no_grad()
    def accepts(self, built: Built) -> bool:
        """Return True if a trial's module equals the group's except for its weights."""
        if _kind_of(built) != self._kind:
            return False
        module = built.module.to(self.device)
        batch = self.x[:COMPARED_EXAMPLES], self.y[:COMPARED_EXAMPLES]
        batch = tree_map(_to_double, batch)
        tensors = tree_map(_to_double, tensors_of(module))
        expected = Functional(self._module).call("loss", tensors, batch)
        loss = Functional(module).call("loss", tensors, batch)
        return torch.allclose(expected, loss, rtol=LOSS_TOLERANCE, atol=0)

    def begin(self, attempt: Attempt, built: Built) -> NetworkRun:
        """Begin or resume the run of an attempt."""
        if self._early_reject:
            attempt.enable_early_checks()
        stacked = self.stack_size > 1
        run = NetworkRun.begin(attempt, built, self.training, self.device, stacked)
        if stacked:
            attempt.flags = {**attempt.flags, STACKED: 1}
        return run

    def next_batches(self, runs: Sequence[NetworkRun | None]) -> Tensor:
        """Return the batches of the next interval.

        Their shape is (steps, batch) if all runs have the same batches, else (steps, rows, batch).
        """
        batches = [None if run is None else next(run.batches) for run in runs]
        present = [each for each in batches if each is not None]
        first = present[0]
        if all(torch.equal(each, first) for each in present):
            return first.to(self.device)
        # The networks of empty rows are trained too, and nobody reads them.
        filled = [first if each is None else each for each in batches]
        return torch.stack(filled, dim=1).to(self.device)

    def hardest_first(self, runs: Sequence[NetworkRun]) -> HardestFirst:
        """Return the early check of these runs, with the priorities of resumed runs."""
        hardest_first = HardestFirst(len(self._validation[1]), len(runs), self.device)
        for row, run in enumerate(runs):
            hardest_first.begin(row, run.priority)
        return hardest_first

    def check(self, networks: NetworkBatch, hardest_first: HardestFirst) -> list[Check]:
        """Return the check of each live run. Early checks stop when the goal is surely missed."""
        x, y = self._validation
        if self._early_reject:
            allowed = []
            for row in networks.live:
                run = networks.runs[row]
                assert run is not None
                allowed.append(run.attempt.max_mistakes(hardest_first.size))
            return hardest_first(
                lambda rows, index: networks.per_example_error(rows, x, y, index),
                networks.live,
                allowed,
            )
        mistakes = torch.zeros(len(networks.live), dtype=torch.int64, device=self.device)
        for rows, index in self._validation_batches(networks.live):
            mistakes += (networks.per_example_error(rows, x, y, index) >= 1).sum(1)
        return [Check(count, True) for count in mistakes.tolist()]

    def validation_losses(self, networks: NetworkBatch) -> list[dict[str, float]]:
        """Return `val_loss` of each live run, rounded to float32 as a logged value."""
        x, y = self._validation
        total = torch.zeros(len(networks.live), dtype=torch.float64, device=self.device)
        for rows, index in self._validation_batches(networks.live):
            total += networks.losses(rows, x, y, index)
        means = (total.float() / len(y)).double()
        return [{"val_loss": loss} for loss in means.tolist()]

    def _validation_batches(self, live: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the live rows and the batches of the validation split, as in Lightning's loop."""
        rows = torch.tensor(live, device=self.device)
        examples = torch.arange(len(self._validation[1]), device=self.device)
        for index in examples.split(self._data.eval_batch_size):
            yield rows, index.expand(len(live), -1)


def _kind_of(built: Built) -> tuple:
    """Return what the trials of a group must have in common: rule, shapes and images."""
    module, data = built.module, built.data
    assert isinstance(module, ImageClassifier) and isinstance(data, ImageData)
    shapes = {}
    for name, tensor in tensors_of(module).items():
        shapes[name] = tensor.shape, tensor.requires_grad
    with unchanged_attributes(module):  # the module is trained afterwards
        optimizer, _ = optimizer_of(module.configure_optimizers())
    return rule_of(optimizer), shapes, id(data.images)


def _to_double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
