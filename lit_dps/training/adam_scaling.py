"""AdamScalingCallback: moves Adam's second moment and weight decay with the batch size."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dps.errors import ConfigError
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP
from lit_dps.training.steps import examples_in


class AdamScalingCallback(Callback):
    """Keeps the time scales of an Adam-like rule in examples, when its batch size B is not that it was tuned at, B0.

    beta2' = beta2^(B / B0) keeps the half-life of the second moment (Marek et al. 2025, arXiv 2507.07101); a weight
    decay times B / B0 keeps how many examples the weights remember (Bergsma et al. 2025, arXiv 2505.13738; for rules
    that have betas alone). Other optimizers are left as they are. B is that of the first step.

    Args:
        reference: B0, in examples of an optimizer step.

    Attributes:
        factor: B / B0, once the first batch was seen; 0 before.

    Raises:
        ConfigError: for a reference below 1.
    """

    def __init__(self, reference: int):
        if reference < 1:
            raise ConfigError("AdamScalingCallback.reference", reference, "at least 1 example")
        self.reference, self.factor = reference, 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # a checkpoint, whose optimizers were scaled, is loaded after this
            self.factor = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.factor:
            return
        # a rank without a part of the batch has got an example to take part with
        idle = isinstance(trainer.strategy, SharedBatchDDP) and trainer.strategy.share == 0
        sizes = ranks.all_gather(0 if idle else examples_in(batch) or 0)
        self.factor = sum(sizes) * trainer.accumulate_grad_batches / self.reference
        for optimizer in trainer.optimizers if self.factor else ():
            for group in optimizer.param_groups:
                if "betas" in group:
                    beta1, beta2 = group["betas"]
                    group["betas"] = beta1, beta2**self.factor
                    if group.get("weight_decay"):
                        group["weight_decay"] *= self.factor

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.factor = state_dict["factor"]


def is_adaptive(optimizers: Any) -> bool:
    """Whether one of some optimizers has the betas of Adam."""
    return adaptive_of(optimizers) is not None


def adaptive_of(optimizers: Any) -> tuple[float, float] | None:
    """beta2 and the largest weight decay of the groups that have the betas of Adam; None where none does."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups if "betas" in group]
    return (groups[0]["betas"][1], max(group.get("weight_decay") or 0.0 for group in groups)) if groups else None
