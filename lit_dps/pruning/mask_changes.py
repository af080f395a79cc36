"""Masks that change during training: dynamic sparse training, such as RigL (Evci et al. 2020).

A pruner with `every` is asked for the next mask after each `every`-th optimizer step. The step
itself uses the mask of before. Evci et al. replace that step by the change of the mask; here the
step is taken too, so that the number of optimizer steps stays comparable.

The loops own the weights and call `MaskChanges`: `lit_dps.training.pruning_callback` in Lightning's
loop, `lit_dps.engines.run_group` and `stack` in the interval loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_dps.core.errors import ConfigError
from lit_dps.core.trial import DENSITY_STEP, DENSITY_SUM, derive_seed
from lit_dps.pruning.mask import Mask, multiply
from lit_dps.pruning.pruner import MaskUpdate, NanScoresError, Pruner, all_finite


@dataclass(frozen=True)
class MaskChanges:
    """When the mask of a run changes, and what it becomes.

    Attributes:
        pruner: The method.
        sparsity: The sparsity of the run.
        seed: Seed of the run's pruning. The random numbers of a change depend on it and on the
            step, so that a resumed run draws the same ones.
        max_steps: Optimizer steps of a run that does not reach its goal.
        every: Optimizer steps between changes.
    """

    pruner: Pruner
    sparsity: float
    seed: int
    max_steps: int
    every: int

    @classmethod
    def of(
        cls, pruner: Pruner, sparsity: float, seed: int, max_steps: int, is_short: bool = False
    ) -> MaskChanges | None:
        """Return the changes of a method; None if its masks do not change.

        Args:
            pruner: The method.
            sparsity: The sparsity of the run.
            seed: Seed of the run's pruning.
            max_steps: Optimizer steps of a run that does not reach its goal.
            is_short: Whether the run only tests the method. Its mask changes after each step.

        Raises:
            ConfigError: if `every` is no positive whole number.
        """
        every = pruner.every
        if every is None:
            return None
        if not isinstance(every, int) or every < 1:
            name = f"{type(pruner).__name__}.every"
            raise ConfigError("pruning.method", f"{name} = {every!r}", "a whole number above 0")
        return cls(pruner, sparsity, seed, max_steps, 1 if is_short else every)

    def is_due(self, step: int) -> bool:
        """Return True if the mask changes after optimizer step number `step`, counted from 1."""
        return step % self.every == 0 and step < self.max_steps

    def next_mask(
        self,
        step: int,
        mask: Mask,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
    ) -> Mask:
        """Return the mask after a step, with tensors on the device of the weights.

        Args:
            step: Optimizer steps taken so far.
            mask: The present mask.
            weights: The weights of masked parameters after the step, by name. Pruned ones are 0.
            gradients: The gradients of the step's batch by name, also of pruned weights.

        Raises:
            ConfigError: if the next mask is not of the same parameters, or if it keeps another
                number of elements although the method hits its count. Also for scores that are nan
                although weights and gradients are finite.
        """
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "mask change", step))
        present = {name: mask[name].to(weights[name].device) for name in mask}
        update = MaskUpdate(
            step=step,
            max_steps=self.max_steps,
            sparsity=self.sparsity,
            mask=Mask(present),
            weights=weights,
            gradients=gradients,
            generator=generator,
        )
        try:
            changed = self.pruner.next_mask(update)
        except NanScoresError as error:
            if all_finite([*weights.values(), *gradients.values()]):
                raise error.of_method(self.pruner) from None
            # Training has diverged, and the next validation ends the trial.
            return update.mask
        self._check(mask, changed, step)
        return changed

    def _check(self, before: Mask, after: Mask, step: int) -> None:
        method = f"{type(self.pruner).__name__} at step {step}"
        shapes = {name: tensor.shape for name, tensor in before.items()}
        if {name: tensor.shape for name, tensor in after.items()} != shapes:
            raise ConfigError("pruning.method", method, f"a mask of {', '.join(shapes)}")
        expected = before.count().kept
        kept = after.count().kept
        if kept == 0:
            raise ConfigError("pruning.method", method, "a mask that keeps at least one weight")
        if self.pruner.hits_count and kept != expected:
            allowed = (
                f"a mask that keeps {expected} elements as before, not {kept}; a method whose "
                "sparsity changes sets hits_count = False"
            )
            raise ConfigError("pruning.method", method, allowed)


def density_flags(flags: Mapping[str, float], step: int, mask: Mask) -> dict[str, float]:
    """Return the `TrialResult.flags` of the density along a run, after a change of the mask.

    Args:
        flags: The flags before the change.
        step: The step after which the mask changes.
        mask: The mask of the steps since the last change.
    """
    counts = mask.count()
    steps = step - flags.get(DENSITY_STEP, 0)
    density_sum = flags.get(DENSITY_SUM, 0.0) + steps * counts.kept / counts.total
    return {DENSITY_SUM: density_sum, DENSITY_STEP: step}


def mask_optimizer_state(
    optimizer: torch.optim.Optimizer, masks: Iterable[tuple[Tensor, Tensor]]
) -> None:
    """Set the state of pruned weights to zero in an optimizer, such as their momentum.

    A weight that grows again begins without momentum, as in RigL. State that belongs to no single
    weight stays, such as the matrices of SOAP.

    Args:
        optimizer: The optimizer. If it has a method `elementwise_state`, only that state is set.
            Otherwise all state of the parameter's shape is.
        masks: Each masked parameter, with its mask as numbers.
    """
    pairs = []
    elementwise_state = getattr(optimizer, "elementwise_state", None)
    for parameter, mask in masks:
        state = optimizer.state.get(parameter, {})
        names = set(state)
        if elementwise_state is not None:
            names = elementwise_state(parameter.ndim)
        for name, value in state.items():
            has_shape = isinstance(value, Tensor) and value.shape == parameter.shape
            if name in names and has_shape:
                pairs.append((value, mask))
    multiply(pairs)
