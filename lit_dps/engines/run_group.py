"""Group: what runs of the interval loop that are trained together share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lit_dps.core.attempt import Attempt
from lit_dps.core.trial import STACKED
from lit_dps.engines.eligible import Functional, optimizer_of, tensors_of
from lit_dps.engines.engine import Training
from lit_dps.engines.network_run import NetworkRun
from lit_dps.optim import rule_of
from lit_dps.training.early_check import Check, HardestFirst
from lit_dps.training.hidden_state import unchanged_attributes
from lit_dps.training.stopwatch import Stopwatch
from lit_dps.training.workload import Built

ALIKE = 64  # examples that tell whether two modules differ in more than their weights
# relative: between losses of such modules in float64. A penalty of 1e-6 is a 1e-5 of a loss
CLOSE = 1e-9


class NetworkBatch(Protocol):
    """The networks of a group, one a row (`One`, `Stack`): whose they are, and the rows that are on
    their way."""

    members: list[NetworkRun | None]
    live: Sequence[int]

    def wrongness(self, rows: Tensor, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """How wrong these rows are about examples, as the module says it: of the index's shape
        (rows, examples)."""

    def losses(self, rows: Tensor, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """The losses of these rows, summed over examples: float64, shape (rows,)."""


class RunGroup:
    """What runs that are trained together share: their data on the device, what a check asks, and
    the order of batches.

    It is made from the first of them, built and its data set up, for so many at most.
    """

    def __init__(self, training: Training, built: Built, device: torch.device, size: int):
        self.training, self.device, self.size = training, device, size
        self.early, self.data, self.module = (
            training.goal.stops_checks_early,
            built.data,
            built.module,
        )
        self.x, self.y = built.data.on_device("train", device)
        self.validation = built.data.on_device("val", device)
        self._kind = _kind_of(built)
        self.interval, self.watch = (
            training.goal.check_interval,
            Stopwatch(),
        )

    @torch.no_grad()
    def takes(self, built: Built) -> bool:
        """Whether a run can be trained beside the others: with its own weights their module is its
        module."""
        if _kind_of(built) != self._kind:
            return False
        batch, other = (self.x[:ALIKE], self.y[:ALIKE]), built.module.to(self.device)
        batch, tensors = tree_map(_wide, batch), tree_map(_wide, tensors_of(other))
        losses = [
            Functional(module).call("loss", tensors, batch) for module in (self.module, other)
        ]
        return torch.allclose(*losses, rtol=CLOSE, atol=0)

    def begin(self, run: Attempt, built: Built) -> NetworkRun:
        """Puts a run on its way."""
        if self.early:
            run.enable_early_checks()
        member = NetworkRun.begin(run, built, self.training, self.device, stacked=self.size > 1)
        if self.size > 1:
            run.flags = {**run.flags, STACKED: 1}
        return member

    def index(self, members: Sequence[NetworkRun | None]) -> Tensor:
        """The batches of the next interval: (steps, batch) where all have the same, else (steps,
        rows, batch)."""
        found = [None if member is None else next(member.batches) for member in members]
        some = next(batches for batches in found if batches is not None)
        if all(batches is None or torch.equal(batches, some) for batches in found):
            return some.to(self.device)
        return torch.stack([some if batches is None else batches for batches in found], dim=1).to(
            self.device
        )

    def checks(self, members: Sequence[NetworkRun]) -> HardestFirst:
        """What checks these runs, with the priorities that they had."""
        check = HardestFirst(len(self.validation[1]), len(members), self.device)
        for row, member in enumerate(members):
            check.begin(row, member.priority)
        return check

    def check(self, networks: NetworkBatch, check: HardestFirst) -> list[Check]:
        """What a check finds of each run that is on its way."""
        rows, (x, y), size = networks.live, self.validation, check.size
        if self.early:
            allowed = [networks.members[row].run.max_mistakes(size) for row in rows]
            return check(lambda rows, index: networks.wrongness(rows, x, y, index), rows, allowed)
        of_batch = (
            (networks.wrongness(live, x, y, index) >= 1).sum(1)
            for live, index in self._whole_split(rows)
        )
        return [Check(n, True) for n in sum(of_batch).tolist()]

    def metrics(self, networks: NetworkBatch) -> list[dict[str, float]]:
        """`val_loss` of each run that is on its way, rounded as a module logs it: to float32."""
        x, y = self.validation
        total = sum(
            networks.losses(live, x, y, index) for live, index in self._whole_split(networks.live)
        )
        return [{"val_loss": loss} for loss in (total.float() / len(y)).double().tolist()]

    def _whole_split(self, rows: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """These rows and the validation split in batches, as in Lightning's loop."""
        live = torch.tensor(rows, device=self.device)
        for index in torch.arange(len(self.validation[1]), device=self.device).split(
            self.data.eval_batch_size
        ):
            yield live, index.expand(len(rows), -1)


def _kind_of(built: Built) -> tuple:
    shapes = {name: (t.shape, t.requires_grad) for name, t in tensors_of(built.module).items()}
    with unchanged_attributes(built.module):  # the module is trained afterwards
        optimizer, _ = optimizer_of(built.module.configure_optimizers())
    return rule_of(optimizer), shapes, id(built.data.images)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
