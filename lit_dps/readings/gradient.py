"""GradientNorm: the norm of the gradient of an optimizer step."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from lit_dps.core.errors import ConfigError
from lit_dps.readings.reading import KEY, Moment, Reading
from lit_dps.training.masked_tensors import squared_norm


class GradientNorm(Reading):
    """The norm of the gradient of the last step before a check (column "gradient_norm").

    It is the gradient that the optimizer steps by, of the whole batch of all ranks: without pruned
    coordinates and before clipping. With `optim.delay` it is the delayed gradient, and 0 before the
    first one.

    Raises:
        ConfigError: for a module that steps its optimizers itself: it may have several losses.
    """

    name = "gradient_norm"
    over_ranks = True

    def __init__(self):
        self._norm = math.nan

    def start(self, moment: Moment) -> None:
        if not moment.module.automatic_optimization:
            module = type(moment.module).__name__
            allowed = f"left out for {module}, which has manual optimization"
            raise ConfigError(KEY, self.name, allowed)

    def see_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        total = 0.0
        for gradient in gradients.values():
            total += float(squared_norm(gradient, None))
        self._norm = math.sqrt(total)

    def read(self, moment: Moment) -> Mapping[str, float]:
        return {"gradient_norm": self._norm}
