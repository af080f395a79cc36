"""PruningCallback: prunes a module at initialization and keeps its pruned weights at zero."""

from __future__ import annotations

from typing import Any, Literal, get_args

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_dps.callbacks.training_pass import TrainingPass
from lit_dps.errors import ConfigError
from lit_dps.pruning.mask import Biases, Mask, prunable
from lit_dps.pruning.prune import top_k
from lit_dps.pruning.scores import take_scores
from lit_dps.trial import check_sparsity

Method = Literal["snip", "magnitude", "random"]


class PruningCallback(Callback):
    """Prunes before the first step, in one global top-k, and trains the weights that are left from where they stand.

    The scores are taken over one pass of the training split (`TrainingPass`).

    Args:
        sparsity: Share of the parameters to prune, in [0, 1); 0 prunes nothing.
        method: Score: "snip" (the paper's), "magnitude" or "random".
        biases: "paper" prunes over weights and biases, as the authors' code does; "keep" over the weights alone.
        batch_size: Examples a batch of the saliency pass. A last short batch weighs as much as its share, so the
            saliency is the sum over the examples, whatever the batch size.
        seed: Seed of the "random" score.

    Attributes:
        mask: The mask, once pruned; None before, and at sparsity 0.
        scores: The scores that the mask was made from; None before, and for a mask from a checkpoint.
    """

    def __init__(
        self,
        sparsity: float = 0.0,
        method: Method = "snip",
        biases: Biases = "paper",
        batch_size: int = 100,
        seed: int = 0,
    ):
        check_sparsity("pruning.sparsity", sparsity)
        for key, value, kind in (("method", method, Method), ("biases", biases, Biases)):
            if value not in get_args(kind):
                raise ConfigError(f"pruning.{key}", value, f"one of {', '.join(get_args(kind))}")
        if batch_size < 1:
            raise ConfigError("pruning.batch_size", batch_size, "at least 1 example")
        self.sparsity, self.method, self.biases = sparsity, method, biases
        self.batch_size, self.seed = batch_size, seed
        self.mask: Mask | None = None
        self.scores: dict[str, Tensor] | None = None
        self._given: dict[str, Tensor] | None = None

    def reuse(self, scores: dict[str, Tensor] | None) -> None:
        """Takes these scores in the next run instead of computing them, which costs as much as an epoch.

        They are the same at every sparsity and batch size.
        """
        self._given = scores

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # a checkpoint is loaded after this
            self.mask, self.scores = None, None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.sparsity > 0 and self.mask is None:  # a run taken up from a checkpoint brings its mask
            parameters = prunable(pl_module, self.biases)
            self.scores, self._given = self._given, None
            if self.scores is None:
                run = TrainingPass(trainer, pl_module, self.batch_size)
                with run.traceless():
                    self.scores = take_scores(self.method, parameters, run.losses(), self.batch_size, self.seed)
            self.mask = top_k(self.scores, self.sparsity)
        if self.mask is not None:
            self.mask.apply_to_weights(pl_module)
            parameters = dict(pl_module.named_parameters())
            self._pairs = [(parameters[name], keep.to(parameters[name].device)) for name, keep in self.mask.items()]

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if self.mask is not None:
            for parameter, keep in self._pairs:
                if parameter.grad is not None:
                    parameter.grad.mul_(keep)

    def state_dict(self) -> dict[str, Any]:
        return {"mask": dict(self.mask) if self.mask is not None else None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.mask = Mask(state_dict["mask"]) if state_dict["mask"] is not None else None
