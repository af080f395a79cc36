"""What workers that are trained apart take of a batch, and what of their network has to stay as it
is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lit_dps.core.errors import ConfigError
from lit_dps.core.local_sgd import LocalSGDSchedule
from lit_dps.parallel.example_count import cut

KEY = "local.workers"


class Still:
    """What the workers of a network have in common has to stay as it is: all tensors that no
    optimizer trains.

    They are one in a process of all workers, and one a rank on ranks: if they moved, results would
    differ.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, rounds: LocalSGDSchedule
    ):
        self.name, self.rounds, self.module = type(module).__name__, rounds, module
        self._trained = {
            id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad
        }
        self._parameters = [
            p for group in optimizer.param_groups for p in group["params"] if p.requires_grad
        ]
        self._before = {name: tensor.detach().clone() for name, tensor in self._others()}

    def _others(self) -> list[tuple[str, Tensor]]:
        named = [*self.module.named_buffers(), *self.module.named_parameters()]
        return [(name, tensor) for name, tensor in named if id(tensor) not in self._trained]

    def check(self) -> None:
        """Raises ConfigError if a buffer, or a parameter that is not trained, has changed since the
        beginning."""
        for name, tensor in self._others():
            if name not in self._before or not _equal(tensor, self._before[name]):
                why = f"changes {name} in training, as batch normalization its running statistics"
                raise ConfigError(KEY, self.rounds.workers, f"1 for {self.name}, which {why}")

    def check_weights(self, left: list[Tensor]) -> None:
        """Raises ConfigError if trained parameters are not as they were left; no tensors are taken
        for any."""
        for parameter, before in zip(self._parameters, left, strict=bool(left)):
            if not _equal(parameter, before):
                why = "whose weights something else than the optimizer moves, between two steps"
                raise ConfigError(KEY, self.rounds.workers, f"1 for {self.name}, {why}")


def part_of(batch: Any, i: int, n: int, examples: int) -> Any:
    """Return the i-th of n equal parts of a batch that can be cut."""
    if n == 1:
        return batch
    return cut(batch, slice(i * examples // n, (i + 1) * examples // n))


def mean_of(losses: list[Tensor]) -> Tensor:
    """The mean loss of some workers; of one its own, to the bit."""
    return torch.stack(losses).mean() if len(losses) > 1 else losses[0]


def _equal(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(ours, theirs) or bool(
        torch.isclose(ours, theirs, rtol=0, atol=0, equal_nan=True).all()
    )
