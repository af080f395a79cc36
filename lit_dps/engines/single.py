"""One: a single network of the interval loop, trained as it is."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_dps.data.loaders import Steps
from lit_dps.engines.network_run import NetworkRun
from lit_dps.module import weights_finite
from lit_dps.optim import OURS, rule_of
from lit_dps.optim.delay import delay_gradients
from lit_dps.pruning.mask import multiply
from lit_dps.training.early_check import evaluating
from lit_dps.training.local_sgd_callback import SharedTensors, mean_of, part_of


class SingleNetwork:
    """Trains one network to the bit as Lightning's loop does: the same calls, of the module's loss
    and its optimizer.

    Lightning spends 0.4 ms on a batch, near what a step of Simple-CNN takes at a batch size of 2,
    to ask hooks, loggers and counters. Between two checks nobody needs an answer here. What it does
    is what a `Stack` of one row does.

    Args:
        member: The run.
    """

    live = (0,)

    def __init__(self, member: NetworkRun):
        self.members, self.member = [member], member
        parameters, mask = dict(member.module.named_parameters()), member.mask or {}
        self._kept = [(parameters[name], keep.to(parameters[name])) for name, keep in mask.items()]
        # pruned weights do not move under a masked gradient; somebody else's rule may move any
        # weight, by noise say
        self._moves = rule_of(member.optimizer) not in OURS
        self._shared = (
            SharedTensors(member.module, member.optimizer, member.local.rounds)
            if member.local is not None
            else None
        )

    def train(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        local, schedule = self.member.local, self.member.schedule
        for batch in Steps(x, y, index):
            loss = self._update(batch) if local is None else self._of_workers(batch)
            if schedule is not None:
                schedule.step()
        if local is not None:
            self._shared.check()
            local.show()  # for the check that follows
        return loss[None]

    def _of_workers(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """A step of all workers. Returns their mean loss before."""
        local, losses = self.member.local, []

        def update(worker: int | None) -> None:
            part = (
                batch
                if worker is None
                else part_of(batch, worker, local.rounds.workers, len(batch[0]))
            )
            losses.append(self._update(part))

        local.step(update)
        if local.steps == 1:
            self._shared.check()
        return mean_of(losses)

    def _update(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """An update of the network as it stands. Returns its loss before."""
        module, optimizer = self.member.module, self.member.optimizer
        optimizer.zero_grad()
        loss = module.loss(batch)
        loss.backward()
        multiply([(p.grad, keep) for p, keep in self._kept if p.grad is not None])
        delay_gradients(optimizer, self.member.delay)
        optimizer.step()
        if self._moves:
            with torch.no_grad():
                multiply(self._kept)
        return loss.detach()

    def write_back(self, row: int) -> None:
        """Nothing: the network is trained where it is."""

    def finite(self) -> list[bool]:
        return [weights_finite(self.member.module)]

    def losses(self, rows: Tensor, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        with evaluating(self.member.module):
            return self.member.module.summed_loss((x[index[0]], y[index[0]])).double()[None]

    def wrongness(self, rows: Tensor, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        with evaluating(self.member.module):
            return self.member.module.wrongness((x[index[0]], y[index[0]])).float()[None]
