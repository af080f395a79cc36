"""PruningCallback: prunes a module at initialization and keeps its pruned weights at zero."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Self

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

import lit_dps.training.lightning_private as lightning_private
from lit_dps.core.errors import ConfigError, UserError, error_text, place_in_user_code
from lit_dps.core.trial import COPIES
from lit_dps.core.trial_config import Biases, Init, PruningConfig
from lit_dps.optim.parameter_groups import trained_ids
from lit_dps.pruning import PRUNERS, Mask, Network, mask_flags, prunable, prune, pruner_of
from lit_dps.pruning.isometry import STEPS
from lit_dps.pruning.mask_changes import MaskChanges, density_flags, mask_optimizer_state
from lit_dps.pruning.network import copies_of, why_pruned_weights_return, why_unprunable
from lit_dps.pruning.pruner import Scores, all_finite, set_unscored_flags
from lit_dps.pruning.start import Redraw, initialize_pruned
from lit_dps.training.delay_callback import DelayCallback
from lit_dps.training.local_sgd_callback import LocalSGDCallback
from lit_dps.training.masked_tensors import MaskedTensors
from lit_dps.training.trainer_state import user_callbacks
from lit_dps.training.training_pass import TrainingPass
from lit_dps.training.unmasked import UnmaskedWeights


class PruningCallback(Callback):
    """Prune a module before the first step, and train the remaining weights.

    The method scores a copy of the module in passes over the training split (`TrainingPass`). It
    prunes parameters that an optimizer trains and that the loss depends on
    (`lit_dps.pruning.prunable`). Copies of these parameters that the module or a callback holds,
    such as the weights of a momentum teacher, get the same mask.

    Gradients are masked in the backward pass, so that clipping sees the pruned network. Gradients
    are masked again before each optimizer step, and weights after it and before each validation,
    because a module, an optimizer or a hook may have changed them.

    A method with `Pruner.every` changes the mask during training (`lit_dps.pruning.mask_changes`).

    Args:
        sparsity, method, biases, batch_size, seed, exclude, options, init:
            Keys of the section `pruning` (`lit_dps.core.trial_config.PruningConfig`).

    Attributes:
        mask: The mask; None before pruning, and at sparsity 0.
        pruner: The method.
        scores: The scores that made the mask, if they also make masks of other sparsities. None
            before pruning, and for a mask from a checkpoint.
        key: Key of the pass over which the scores were computed (`TrainingPass.key`).
        is_short: Whether to compute the scores from a few batches only, to test that this works.
            Set it before a run.
        redraw: Builds the module again, for "reinit"; None outside of a study. Set it before a run.
        flags: Facts about the mask that a reader of results should know, as in
            `TrialResult.flags`.

    Raises:
        ConfigError: if a value is out of its range; when training starts, if the method cannot
            prune the module.

    Example::

        pruning = PruningCallback(sparsity=0.9, method="snip")
        Trainer(callbacks=[pruning]).fit(module, datamodule=data)
        print(pruning.mask.kept())
    """

    def __init__(
        self,
        sparsity: float = 0.0,
        method: str = "snip",
        biases: Biases = "paper",
        batch_size: int = 100,
        seed: int = 0,
        exclude: Sequence[str] = (),
        options: dict[str, Any] | None = None,
        init: Init = "original",
    ):
        PruningConfig(sparsity, method, biases, batch_size, seed, exclude, options, init)  # checks
        self.pruner = pruner_of(method, options)
        self.sparsity = sparsity
        self.method = method
        self.biases: Biases = biases
        self.batch_size = batch_size
        self.seed = seed
        self.exclude = tuple(exclude)
        self.init: Init = init
        self.redraw: Redraw | None = None
        self.is_short = False
        self._reusable: tuple[tuple[int, ...], Scores] | None = None
        self._masked: MaskedTensors | None = None
        self._reset()

    @classmethod
    def of(cls, config: PruningConfig) -> Self:
        """Return the callback of a configuration."""
        return cls(**vars(config))

    def _reset(self) -> None:
        self.mask: Mask | None = None
        self.scores: Scores | None = None
        self.flags: dict[str, float] = {}
        self.key: tuple[int, ...] | None = None
        self._copies: dict[str, str] = {}  # name of a copy -> name of its parameter
        # Parameters that the method considered but did not mask, such as biases of kept nodes.
        self._kept_dense: set[str] = set()
        # The user's callbacks, which may hold copies of the network, by the name of their class.
        self._callbacks: dict[str, list[Callback]] = {}
        self._hooked_optimizers: list[Optimizer] = []
        self._is_swapped = False  # whether other weights were in place in the last validation
        self._changes: MaskChanges | None = None
        # The gradients of this step, also of pruned weights, if the mask changes after it.
        self._dense_gradients: dict[str, Tensor] | None = None
        self._has_loss = False  # whether a batch since the last step had a loss
        self._is_dense = False  # whether pruned weights have gradients in the backward pass
        self._remove_hooks()
        self._masked = None

    def reuse(self, key: tuple[int, ...], scores: Scores) -> None:
        """Use these scores in the next run, because computing them costs as much as an epoch.

        Args:
            key: Key of their pass. A run with another key ignores them.
            scores: Scores of a network with the same initial weights.
        """
        self._reusable = (key, scores)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # a checkpoint is loaded after this
            self._reset()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for callback in user_callbacks(trainer):
            self._callbacks.setdefault(f"callbacks.{type(callback).__name__}", []).append(callback)
        # A run from a checkpoint has its mask already.
        prunes = self.sparsity > 0 and self.mask is None
        if prunes:
            self._prune(trainer, pl_module)
        if self.mask is None:
            return
        self._masked = MaskedTensors(pl_module, self.mask, self._copies, self._callbacks)
        if prunes:
            self._masked.update_copies()
        self._masked.zero()
        reason = why_pruned_weights_return(pl_module, self.mask)
        if reason is not None:
            raise self._sparsity_error(pl_module, reason)
        self._unmasked = UnmaskedWeights(self.biases, self.exclude, self._is_masked)
        self._unmasked.flags = self.flags  # set already in a run from a checkpoint
        self._hook_optimizers(trainer, pl_module)
        self._begin_changes(trainer, pl_module)

    def _begin_changes(self, trainer: Trainer, module: LightningModule) -> None:
        """Prepare the changes of the mask, if the method makes any."""
        self._changes = MaskChanges.of(
            self.pruner, self.sparsity, self.seed, trainer.max_steps, self.is_short
        )
        if self._changes is None:
            return
        reason = None
        if not module.automatic_optimization:
            reason = "with manual optimization"
        elif len(trainer.optimizers) != 1:
            reason = f"with {len(trainer.optimizers)} optimizers"
        elif not hasattr(trainer.optimizers[0], "register_step_post_hook"):
            reason = f"with {type(trainer.optimizers[0]).__name__}, which has no step hooks"
        elif trainer.max_steps < 0:
            reason = "without trainer.max_steps"
        # Delayed gradients belong to an earlier mask. Workers of local SGD have own weights.
        for callback in lightning_private.callbacks_of(trainer, DelayCallback):
            if callback.delay > 0:
                reason = f"with optim.delay = {callback.delay}"
        for callback in lightning_private.callbacks_of(trainer, LocalSGDCallback):
            if callback.schedule.on:
                reason = f"with local.workers = {callback.schedule.workers}"
        if reason is not None:
            raise self._method_error(f"a method whose mask does not change, {reason}")

    def _is_change_due(self, trainer: Trainer) -> bool:
        """Return True if the mask changes after the next optimizer step."""
        return self._changes is not None and self._changes.is_due(trainer.global_step + 1)

    def _change_mask(self, step: int, optimizer: Optimizer) -> None:
        """Set the mask that follows an optimizer step."""
        assert self._masked is not None and self._changes is not None and self.mask is not None
        assert self._dense_gradients is not None
        # In place, because other objects hold the flags.
        self.flags.update(density_flags(self.flags, step, self.mask))
        self.mask = self._changes.next_mask(
            step, self.mask, self._masked.weights(), self._dense_gradients
        )
        set_unscored_flags(self.flags, self.mask)
        self._dense_gradients = None
        self._is_dense = False
        with torch.no_grad():
            self._masked.set(self.mask)
            mask_optimizer_state(optimizer, self._masked.parameters_with_masks())

    def _hook_optimizers(self, trainer: Trainer, module: LightningModule) -> None:
        """Act after each optimizer step, also of optimizers that were added later."""
        for optimizer in trainer.optimizers:
            is_hooked = any(optimizer is hooked for hooked in self._hooked_optimizers)
            if not is_hooked and hasattr(optimizer, "register_step_post_hook"):
                optimizer.register_step_post_hook(partial(self._after_step, trainer, module))
                self._hooked_optimizers.append(optimizer)

    def _is_masked(self, name: str, tensor: Tensor) -> bool:
        """Return True if a tensor is masked, or is kept dense by the method."""
        if name in self._kept_dense:
            return True
        return self._masked is not None and self._masked.includes(name, tensor)

    def _prune(self, trainer: Trainer, module: LightningModule) -> None:
        """Make the mask, and move the weights to their start under it."""
        self._check_module(module)
        held = trained_ids_of(trainer)
        parameters = prunable(module, self.biases, self.exclude, held)
        data_pass = TrainingPass(trainer, module, self.batch_size, is_short=self.is_short)
        self.key = data_pass.key
        copy = partial(self._copy, data_pass, module, list(parameters))
        mask = self._make_mask(module, copy)
        self.mask = mask
        # An exact method masks all parameters that the loss depends on; the others may join later.
        if not self.pruner.hits_count:
            self._kept_dense = parameters.keys() - mask.keys()
        for name, parameter in copies_of(module, mask, held, self._callbacks).items():
            if not any(fnmatchcase(name, pattern) for pattern in self.exclude):
                self._copies[name] = parameter
        trained = 0
        for parameter in module.parameters():
            if parameter.requires_grad and id(parameter) in held:
                trained += parameter.numel()
        self.flags = mask_flags(mask, self.pruner, trained)
        isometry_steps = 1 if self.is_short else STEPS
        self.flags |= initialize_pruned(self.init, module, mask, copy, self.redraw, isometry_steps)
        if self._copies:
            self.flags[COPIES] = sum(mask[name].numel() for name in self._copies.values())

    def _make_mask(self, module: LightningModule, copy: Any) -> Mask:
        """Return the method's mask, from scores of an earlier run if they are of the same pass.

        Args:
            module: The module.
            copy: Returns a context manager that makes the copy for the method.
        """
        scores = None
        if self._reusable is not None and self._reusable[0] == self.key:
            scores = self._reusable[1]
        self._reusable = None
        name = type(module).__name__
        try:
            mask, self.scores = prune(self.pruner, copy, self.sparsity, self.seed, name, scores)
        except (AttributeError, AssertionError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, UserError) or not self.pruner.passes:
                raise
            raise self._pass_error(name, error) from error
        return mask

    def _check_module(self, module: LightningModule) -> None:
        """Raise ConfigError for a module that the method cannot prune."""
        reason = why_unprunable(module)
        if reason is not None:
            raise self._sparsity_error(module, reason)
        if not module.automatic_optimization and self.pruner.passes:
            without = " or ".join(method for method, kind in PRUNERS.items() if kind.passes == 0)
            raise self._method_error(
                f"{without} for {type(module).__name__}: it has manual optimization, so its "
                "training_step does more than return a loss"
            )

    def _method_error(self, allowed: str) -> ConfigError:
        return ConfigError("pruning.method", self.method, allowed)

    def _sparsity_error(self, module: LightningModule, reason: str) -> ConfigError:
        return ConfigError(
            "study.sparsities", self.sparsity, f"0 for {type(module).__name__}: {reason}"
        )

    def _pass_error(self, name: str, error: Exception) -> ConfigError:
        """Return the error for a training step that fails in the pruning pass."""
        text = " ".join(error_text(error).split())[:200]
        failure = f"{type(error).__name__}: {text}{place_in_user_code(error)}"
        return self._method_error(
            "magnitude or another method without a pruning pass. The training_step of "
            f"{name} failed in the pruning pass, which runs before training: {failure}. "
            "Make what it needs in __init__, or use another pruning.batch_size or a "
            "loader with drop_last if it needs full batches. If it fails at sparsity 0 "
            "too, correct training_step"
        )

    @contextmanager
    def _copy(
        self, data_pass: TrainingPass, module: LightningModule, names: Sequence[str]
    ) -> Iterator[Network]:
        """Yield a copy of the module for the method, without side effects on the module."""
        with data_pass.without_side_effects(begin=True) as twin:

            def loss_of(batch: Any, i: int) -> Tensor | None:
                loss = data_pass.loss(twin, batch, i)
                if i == 0 and loss is not None:
                    self._check_loss(loss, module)
                return loss

            named = dict(twin.named_parameters())
            yield Network(
                module=twin,
                parameters={name: named[name] for name in names},
                batch_size=self.batch_size,
                length=data_pass.__len__,
                batches=data_pass.batches,
                loss_of=loss_of,
            )

    def _check_loss(self, loss: Tensor, module: LightningModule) -> None:
        """Raise ConfigError if a method cannot take gradients of the copy's loss."""
        reason = None
        originals = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if is_reentrant(loss):
            reason = (
                "its torch.utils.checkpoint hides weights from the pruning pass: call it with "
                "use_reentrant=False"
            )
        elif depends_on(loss, originals):
            reason = (
                "the pruning pass runs on a copy of it, and this copy still uses the "
                "parameters of the original"
            )
        if reason is not None:
            raise self._method_error(f"magnitude for {type(module).__name__}: {reason}")

    def _after_step(
        self, trainer: Trainer, module: LightningModule, optimizer: Optimizer, *args: Any
    ) -> None:
        self._unmasked.update(trainer, module, optimizer)
        if self._masked is not None:
            self._masked.zero_weights_of(optimizer)
            if _takes_gradients_elsewhere(optimizer):
                # A hook of the user may have changed gradients after they were masked. Then pruned
                # weights are 0, but the weights at which the next gradient is taken are not.
                mask_optimizer_state(optimizer, self._masked.parameters_with_masks())
        if self._dense_gradients is not None and not self._overflows(trainer):
            self._change_mask(trainer.global_step + 1, optimizer)

    def _overflows(self, trainer: Trainer) -> bool:
        """Return True if the scaled gradients of this step overflow, so that it changes nothing."""
        assert self._dense_gradients is not None
        is_scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        return is_scaled and not all_finite(self._dense_gradients.values())

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        self._has_loss = True

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if self._masked is None:
            return
        # A step without a loss does not count (`StepCount`).
        if self._is_change_due(trainer) and self._has_loss:
            self._dense_gradients = self._masked.dense_gradients()
        self._has_loss = False
        self._masked.mask_gradients()
        clears_gradients = _takes_gradients_elsewhere(optimizer)
        if clears_gradients or not hasattr(optimizer, "register_step_post_hook"):
            self._unmasked.update(trainer, pl_module, optimizer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any
    ) -> None:
        if self._masked is None:
            return
        self._hook_optimizers(trainer, pl_module)
        self._unmasked.begin_batch(trainer)
        if self._is_swapped:
            # Usually the weights that a validation swapped in are gone now.
            self._is_swapped = self._masked.find_replaced()
        self._masked.zero()
        # A scaler skipped the step, so the mask stays until the next change.
        self._dense_gradients = None
        if self._is_change_due(trainer):
            self._masked.remove_hooks()
            self._is_dense = True
        elif self._is_dense:
            self._masked.find()
            self._is_dense = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if self._masked is not None:
            self._masked.zero()

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        # The first batch comes after all hooks that may swap in other weights for a validation.
        if self._masked is not None and batch_idx == dataloader_idx == 0:
            self._is_swapped = self._masked.find_replaced()
            self._masked.zero()

    def _remove_hooks(self) -> None:
        if self._masked is not None:
            self._masked.remove_hooks()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._remove_hooks()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._remove_hooks()

    def state_dict(self) -> dict[str, Any]:
        return {
            "mask": None if self.mask is None else dict(self.mask),
            "copies": self._copies,
            "left_dense": sorted(self._kept_dense),
            "observed": self.flags,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        mask = state_dict["mask"]
        self.mask = None if mask is None else Mask(mask)
        self._copies = state_dict.get("copies", {})
        self._kept_dense = set(state_dict.get("left_dense", ()))
        self.flags = state_dict.get("observed", {})


def _takes_gradients_elsewhere(optimizer: Optimizer) -> bool:
    """Return True if the optimizer's gradients are of other weights (`Rule.gradient_point`)."""
    rule = getattr(optimizer, "rule", None)
    return getattr(rule, "gradient_point", None) is not None


def masks_of(trainer: Trainer, module: LightningModule) -> dict[str, Tensor]:
    """Return the mask of each pruned parameter by name, on the parameter's device."""
    parameters = dict(module.named_parameters())
    masks = {}
    for callback in lightning_private.callbacks_of(trainer, PruningCallback):
        if callback.mask is not None:
            for name, mask in callback.mask.items():
                masks[name] = mask.to(parameters[name].device)
    return masks


def masks_by_parameter(trainer: Trainer, module: LightningModule) -> dict[Tensor, Tensor]:
    """Return the mask of each pruned parameter by the parameter itself, on its device."""
    parameters = dict(module.named_parameters())
    return {parameters[name]: mask for name, mask in masks_of(trainer, module).items()}


def trained_ids_of(trainer: Trainer) -> set[int]:
    """Return the `id` of each parameter that an optimizer of a trainer trains."""
    return trained_ids(trainer.optimizers)


def is_reentrant(loss: Tensor) -> bool:
    """Return True if the graph of a loss has reentrant checkpoints, which hide gradients."""
    if loss.grad_fn is None:
        return False
    nodes = [loss.grad_fn]
    visited = {loss.grad_fn}
    while nodes:
        node = nodes.pop()
        if node.name() == "CheckpointFunctionBackward":
            return True
        for parent, _ in node.next_functions:
            if parent is not None and parent not in visited:
                visited.add(parent)
                nodes.append(parent)
    return False


def depends_on(loss: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Return True if the graph of a loss contains one of these parameters."""
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    return any(gradient is not None for gradient in gradients)
