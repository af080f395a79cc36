"""Clipping: limits gradients between the backward pass and the update, as a Trainer does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# As `torch.nn.utils.clip_grad_norm_` adds it to the norm.
NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class Clipping:
    """The limit of the gradients of an optimizer.

    Attributes:
        limit: The largest norm of the gradient of all parameters, or the largest absolute value of
            an element.
        by_value: Whether the limit is of each element.
    """

    limit: float
    by_value: bool = False

    @classmethod
    def of(cls, trainer: Mapping[str, Any]) -> Clipping | None:
        """Return the clipping that the arguments of a `Trainer` ask for; None without clipping."""
        limit = trainer.get("gradient_clip_val")
        if limit is None or limit <= 0:
            return None
        algorithm = trainer.get("gradient_clip_algorithm") or "norm"
        return cls(float(limit), by_value=str(algorithm).rpartition(".")[2].lower() == "value")

    def clip(self, parameters: Iterable[Tensor]) -> None:
        """Clip the gradients of the parameters of one network, by the same call as Lightning."""
        if self.by_value:
            torch.nn.utils.clip_grad_value_(parameters, self.limit)
        else:
            torch.nn.utils.clip_grad_norm_(parameters, self.limit)

    def clip_rows(self, gradients: Tensor) -> None:
        """Clip the gradients of each network in place: shape (networks, parameters)."""
        if self.by_value:
            gradients.clamp_(-self.limit, self.limit)
            return
        norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
        gradients.mul_((self.limit / (norms + NORM_EPSILON)).clamp(max=1.0))
