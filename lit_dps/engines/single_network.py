"""SingleNetwork: one network in the interval loop, equal to Lightning's loop to the bit."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from lit_dps.data.loaders import Steps
from lit_dps.engines.module_hooks import STEP_HOOKS, NeedsLightning, overridden
from lit_dps.engines.network_rows import NetworkRows
from lit_dps.engines.network_run import NetworkRun
from lit_dps.module import weights_finite
from lit_dps.optim import OURS, rule_of
from lit_dps.optim.delay import delay_gradients
from lit_dps.optim.local_sgd import LocalSGD
from lit_dps.optim.parameter_groups import parameters_of
from lit_dps.optim.rule import at_gradient_point
from lit_dps.optim.weight_average import showing
from lit_dps.pruning import prunable, pruner_of
from lit_dps.pruning.mask import multiply
from lit_dps.pruning.mask_changes import mask_optimizer_state
from lit_dps.training.batch_schedule_callback import scaled_rates
from lit_dps.training.early_validation import evaluating
from lit_dps.training.local_sgd_callback import SharedTensors, mean_of, part_of
from lit_dps.training.masked_tensors import gradients_of


class SingleNetwork(NetworkRows):
    """Trains one network with the same result as Lightning's loop, to the bit.

    It calls the module's loss and optimizer in the same order. Lightning also asks hooks, loggers
    and counters after each batch, which takes 0.4 ms: nearly as long as a step of Simple-CNN at a
    batch size of 2.

    Args:
        run: The run to train.
    """

    def __init__(self, run: NetworkRun):
        super().__init__([run])
        self.run = run
        self.snapshots = SingleSnapshot(run)
        self._masked = run.masked_parameters()
        # The rules of lit_dps do not move weights with masked gradients. Another rule may move any
        # weight, for example by noise, and so may a hook.
        self._has_step_hooks = bool(overridden(run.module, STEP_HOOKS))
        self._moves_pruned = rule_of(run.optimizer) not in OURS or self._has_step_hooks
        self._trainable = self._find_trainable()
        self._unmasked = self._find_unmasked()
        self._local: tuple[LocalSGD, SharedTensors] | None = None
        if run.local is not None:
            self._local = run.local, SharedTensors(run.module, run.optimizer, run.local.schedule)

    def train(
        self,
        x: Tensor,
        y: Tensor,
        index: Tensor | tuple[Tensor, ...],
        steps_since_validation: int = 0,
    ) -> Tensor:
        """Take one optimizer step for each row of `index`; see `StackedNetworks.train`."""
        schedule = self.run.schedule
        if not isinstance(index, Tensor):
            index = tuple(of_step.to(y.device) for of_step in index)
        loss = None
        first_step = self.run.steps + steps_since_validation + 1
        for step, batch in enumerate(Steps(x, y, index), first_step):
            if self.run.changes is not None and self.run.changes.is_due(step):
                loss = self._update_and_change_mask(batch, step)
            elif self._local is None:
                loss = self._update(batch, step)
            else:
                loss = self._update_workers(batch, step, *self._local)
            if schedule is not None:
                schedule.step()
            self.run.attempt.on_step(y.device)
        if self._local is not None:
            local, shared = self._local
            shared.raise_if_changed()
            local.show()  # so that the validation sees the average of the workers
        if self._find_trainable() != self._trainable:
            name = type(self.run.module).__name__
            raise NeedsLightning(f"{name} changes which weights are trained")
        if any(parameter.grad is not None for parameter in self._unmasked):
            name = type(self.run.module).__name__
            raise NeedsLightning(f"{name} trains weights that its loss did not use when pruned")
        assert loss is not None
        return loss[None]

    def _find_trainable(self) -> list[bool | int]:
        """Return for each parameter whether it is trained, and how many the optimizer has."""
        trainable: list[bool | int] = [p.requires_grad for p in self.run.module.parameters()]
        return [*trainable, len(list(parameters_of(self.run.optimizer)))]

    def _find_unmasked(self) -> list[Tensor]:
        """Return the parameters without a mask that pruning would cover; `UnmaskedWeights`."""
        config, mask = self.run.pruning, self.run.mask
        # A method that does not hit its count may keep a parameter dense.
        if config is None or mask is None:
            return []
        if not pruner_of(config.method, config.options).hits_count:
            return []
        unmasked: list[Tensor] = []
        candidates = prunable(self.run.module, config.biases, config.exclude, self.run.trained)
        for name, parameter in candidates.items():
            if name not in mask:
                unmasked.append(parameter)
        return unmasked

    def _update_workers(
        self, batch: tuple[Tensor, Tensor], step: int, local: LocalSGD, shared: SharedTensors
    ) -> Tensor:
        """Take a step of all workers of local SGD; return their mean loss before it."""
        losses = []

        def update(worker: int | None) -> None:
            if worker is None:
                part = batch
            else:
                part = part_of(batch, worker, local.schedule.workers, len(batch[0]))
            losses.append(self._update(part, step))

        local.step(update)
        if local.steps == 1:
            shared.raise_if_changed()
        return mean_of(losses)

    def _update(self, batch: tuple[Tensor, Tensor], step: int) -> Tensor:
        """Take optimizer step number `step`; return the loss before it."""
        loss = self._loss_and_gradients(batch)
        self._mask_gradients()
        self.run.module.on_after_backward()
        if self._has_step_hooks:
            self._mask_gradients()
        delay_gradients(self.run.optimizer, self.run.delay)
        self._step(step)
        if self.run.average is not None:
            self.run.average.update(len(batch[1]))
        return loss

    def _update_and_change_mask(self, batch: tuple[Tensor, Tensor], step: int) -> Tensor:
        """Take optimizer step number `step`, then change the mask; return the loss before it."""
        run = self.run
        loss = self._loss_and_gradients(batch)
        run.module.on_after_backward()
        weights = {}
        gradients = {}
        parameters = dict(run.module.named_parameters())
        for name in run.mask or {}:
            weights[name] = parameters[name].detach()
            gradient = parameters[name].grad
            gradients[name] = torch.zeros_like(weights[name])
            if gradient is not None:
                gradients[name].copy_(gradient)
        self._mask_gradients()
        self._step(step)
        run.change_mask(step, weights, gradients)
        self._masked = run.masked_parameters()
        with torch.no_grad():
            multiply(self._masked)
            mask_optimizer_state(run.optimizer, self._masked)
        if run.average is not None and run.mask is not None:
            run.average.update(len(batch[1]))
            run.average.mask(run.mask)
        return loss

    def _loss_and_gradients(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Set the gradients of all parameters, and return the loss."""
        module = self.run.module
        with at_gradient_point(self.run.optimizer):
            loss = module.loss(batch)
            module.on_before_zero_grad(self.run.optimizer)
            self.run.optimizer.zero_grad()
            module.on_before_backward(loss)
            loss.backward()
        return loss.detach()

    def _step(self, step: int) -> None:
        """Step the optimizer for the time number `step`."""
        run = self.run
        rates = nullcontext()
        if run.rate_factors is not None:
            rates = scaled_rates(run.optimizer, run.rate_factors.at(step - 1))
        with rates:
            if run.readings is not None:
                run.readings.count(float(run.optimizer.param_groups[0]["lr"]))
                run.readings.see_gradients(step, partial(gradients_of, run.module, run.optimizer))
            run.module.on_before_optimizer_step(run.optimizer)
            if run.clipping is not None:
                run.clipping.clip(parameters_of(run.optimizer))
            run.optimizer.step()
            if self._moves_pruned:
                with torch.no_grad():
                    multiply(self._masked)

    def _mask_gradients(self) -> None:
        """Set the gradients of pruned weights to zero."""
        gradients = []
        for parameter, keep in self._masked:
            if parameter.grad is not None:
                gradients.append((parameter.grad, keep))
        multiply(gradients)


class SingleSnapshot:
    """The network of a run, for its validation. Loops call it like the `Snapshots` of a stack."""

    def __init__(self, run: NetworkRun):
        self._run = run

    def are_finite(self) -> list[bool]:
        """Return whether all weights are finite, in a list of one."""
        return [weights_finite(self._run.module)]

    def per_example_error(self, rows: Tensor, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """See `Snapshots.per_example_error`."""
        with showing(self._run.average), evaluating(self._run.module):
            return self._run.module.per_example_error((x[index[0]], y[index[0]])).float()[None]

    def losses(self, rows: Tensor, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """See `Snapshots.losses`."""
        with showing(self._run.average), evaluating(self._run.module):
            return self._run.module.summed_loss((x[index[0]], y[index[0]])).double()[None]
