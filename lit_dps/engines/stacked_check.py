"""StackedCheck: checks of many networks at once, each of which stops when it knows the answer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_dps.engines.stack import Stack
from lit_dps.training.early_check import CHUNK, Check


class StackedCheck:
    """`lit_dps.training.early_check.EarlyCheck` for the rows of a stack: the same decisions, taken side by side.

    Args:
        x: Images of the validation split.
        y: Their classes.
        rows: Rows of the stack.
    """

    def __init__(self, x: Tensor, y: Tensor, rows: int):
        self.x, self.y, self.size = x, y, len(y)
        self._priority = torch.zeros(rows, self.size, device=y.device)

    def forget(self, row: int) -> None:
        """Another network begins in this row."""
        self._priority[row] = 0.0

    def take(self, rows: Tensor) -> None:
        """As `Stack.take`."""
        self._priority = self._priority[rows]

    def __call__(self, stack: Stack, rows: Sequence[int], allowed: Sequence[int]) -> list[Check]:
        """Looks at each row's hardest examples first, until more than allowed are wrong, or at all.

        Args:
            stack: The networks.
            rows: Which of them to check.
            allowed: The most mistakes of each that meet its goal; the validation split's size for a full check.
        """
        device = self.y.device
        rows, allowed = torch.tensor(rows, device=device), torch.tensor(allowed, device=device)
        order = torch.argsort(self._priority[rows], dim=1, descending=True, stable=True)
        mistakes, asked = torch.zeros_like(allowed), torch.arange(len(rows), device=device)
        seen = 0
        looked = torch.zeros_like(allowed)
        while seen < self.size and len(asked):
            chunk = max(CHUNK, int((allowed - mistakes)[asked].min()) + 1)
            index = order[asked, seen : seen + chunk]
            wrongness = stack.wrongness(rows[asked], self.x, self.y, index)
            priority = self._priority[rows[asked]]
            self._priority[rows[asked]] = priority.scatter(1, index, priority.gather(1, index) / 2 + wrongness)
            mistakes[asked] += (wrongness >= 1).sum(1)
            looked[asked] += index.shape[1]
            seen += index.shape[1]
            asked = asked[(mistakes <= allowed)[asked]]
        found = zip(mistakes.tolist(), (looked == self.size).tolist(), strict=True)
        return [Check(number, exact) for number, exact in found]
