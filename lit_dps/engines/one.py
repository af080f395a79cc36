"""One: a network of the interval loop as it is, with its own torch optimizer."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_dps.data.loaders import Steps
from lit_dps.engines.member import Member
from lit_dps.module import weights_finite
from lit_dps.optim import rule_of
from lit_dps.training.early_check import evaluating


class One:
    """Trains one network to the bit as Lightning's loop does: the same calls, of the module's loss and its optimizer.

    Lightning spends 0.4 ms on a batch, near what a step of Simple-CNN takes at a batch size of 2, to ask hooks, loggers
    and counters. Between two checks nobody needs an answer here.

    Args:
        member: The network.
    """

    live = (0,)

    def __init__(self, member: Member):
        self.members, self.member = [member], member
        parameters, mask = dict(member.module.named_parameters()), member.mask or {}
        self._kept = [(parameters[name], keep.to(parameters[name])) for name, keep in mask.items()]
        # pruned weights of plain SGD do not move under a masked gradient; other rules may move any weight
        self._moves = rule_of(member.optimizer) is None

    def train(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Takes optimizer steps.

        Args:
            x: Images of the training split.
            y: Their classes.
            index: Examples of each step: (steps, batch).

        Returns:
            The loss at the last step, before its update: shape (1,).
        """
        module, optimizer, schedule = self.member.module, self.member.optimizer, self.member.schedule
        for batch in Steps(x, y, index):
            optimizer.zero_grad()
            loss = module.loss(batch)
            loss.backward()
            _multiply([(p.grad, keep) for p, keep in self._kept if p.grad is not None])
            optimizer.step()
            if self._moves:
                with torch.no_grad():
                    _multiply(self._kept)
            if schedule is not None:
                schedule.step()
        return loss.detach()[None]

    def write_back(self, row: int) -> None:
        """Nothing: the network is trained where it is."""

    def finite(self) -> list[bool]:
        """Whether every weight is finite."""
        return [weights_finite(self.member.module)]

    def wrongness(self, rows: Tensor, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """How wrong the network is about examples, as the module says it: of the index's shape (1, examples)."""
        with evaluating(self.member.module):
            return self.member.module.wrongness((x[index[0]], y[index[0]])).float()[None]


def _multiply(pairs: list[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        torch._foreach_mul_(*map(list, zip(*pairs, strict=True)))
