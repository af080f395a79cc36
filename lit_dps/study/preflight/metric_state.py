"""Finds objects of torchmetrics that are not empty when a validation begins."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torchmetrics.metric import CompositionalMetric

from lit_dps.engines.metric_objects import metric_objects


class StaleMetricObjects(Callback):
    """Finds objects of torchmetrics to which a validation adds its batches beside earlier ones.

    The earlier batches are of training, or of a validation after which the object was not reset.
    The metric then depends on them, in Lightning too.

    Attributes:
        paths: The objects, by their path in the module.
    """

    def __init__(self):
        self.paths: list[str] = []
        self._counts: dict[str, int] = {}

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx or dataloader_idx:
            return
        objects = metric_objects(pl_module)
        self._counts = {path: metric.update_count for path, metric in objects.items()}

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        for path, metric in metric_objects(pl_module).items():
            # `1 - accuracy` has no state, and does not reset its count of updates.
            if isinstance(metric, CompositionalMetric):
                continue
            before = self._counts.get(path, 0)
            if 0 < before < metric.update_count and path not in self.paths:
                self.paths.append(path)

    def notes(self, name: str) -> list[str]:
        """Return a note on the objects of a module of this name; none if there are none."""
        if not self.paths:
            return []
        return [
            f"{name} does not reset {', '.join(self.paths)} before a validation, so that its value "
            "also counts batches of training or of earlier validations. Use one object of "
            "torchmetrics for training and another for validation, and reset them."
        ]
