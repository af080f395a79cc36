"""SingleNetwork: trains one network of the interval loop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_dps.data.loaders import Steps
from lit_dps.engines.module_hooks import STEP_HOOKS, NeedsLightning, overridden
from lit_dps.engines.network_run import NetworkRun
from lit_dps.module import weights_finite
from lit_dps.optim import OURS, rule_of
from lit_dps.optim.delay import delay_gradients
from lit_dps.optim.local_sgd import LocalSGD
from lit_dps.pruning.mask import multiply
from lit_dps.training.early_check import evaluating
from lit_dps.training.local_sgd_callback import SharedTensors, mean_of, part_of


class SingleNetwork:
    """Trains one network with the same result as Lightning's loop, to the bit.

    It calls the module's loss and optimizer in the same order. Lightning also asks hooks, loggers
    and counters after each batch, which takes 0.4 ms: nearly as long as a step of Simple-CNN at a
    batch size of 2. This class has the interface of a `StackedNetworks` with one row.

    Args:
        run: The run to train.
    """

    live: Sequence[int] = (0,)

    def __init__(self, run: NetworkRun):
        self.runs: list[NetworkRun | None] = [run]
        self.run = run
        self._masked = run.masked_parameters()
        # The rules of lit_dps do not move weights with masked gradients. Another rule may move any
        # weight, for example by noise, and so may a hook.
        self._has_step_hooks = bool(overridden(run.module, STEP_HOOKS))
        self._moves_pruned = rule_of(run.optimizer) not in OURS or self._has_step_hooks
        self._trainable = self._find_trainable()
        self._local: tuple[LocalSGD, SharedTensors] | None = None
        if run.local is not None:
            self._local = run.local, SharedTensors(run.module, run.optimizer, run.local.rounds)

    def run_at(self, row: int) -> NetworkRun:
        """Return the run."""
        return self.run

    def train(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Take one optimizer step for each row of `index`; see `StackedNetworks.train`."""
        schedule = self.run.schedule
        loss = None
        for batch in Steps(x, y, index):
            if self._local is None:
                loss = self._update(batch)
            else:
                loss = self._update_workers(batch, *self._local)
            if schedule is not None:
                schedule.step()
        if self._local is not None:
            local, shared = self._local
            shared.check()
            local.show()  # so that the check sees the average of the workers
        if self._find_trainable() != self._trainable:
            name = type(self.run.module).__name__
            raise NeedsLightning(f"{name} changes which weights are trained")
        assert loss is not None
        return loss[None]

    def _find_trainable(self) -> list[bool]:
        """Return for each parameter whether it is trained."""
        return [parameter.requires_grad for parameter in self.run.module.parameters()]

    def _update_workers(
        self, batch: tuple[Tensor, Tensor], local: LocalSGD, shared: SharedTensors
    ) -> Tensor:
        """Take a step of all workers of local SGD; return their mean loss before it."""
        losses = []

        def update(worker: int | None) -> None:
            if worker is None:
                part = batch
            else:
                part = part_of(batch, worker, local.rounds.workers, len(batch[0]))
            losses.append(self._update(part))

        local.step(update)
        if local.steps == 1:
            shared.check()
        return mean_of(losses)

    def _update(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Take an optimizer step; return the loss before it."""
        module = self.run.module
        optimizer = self.run.optimizer
        loss = module.loss(batch)
        module.on_before_zero_grad(optimizer)
        optimizer.zero_grad()
        module.on_before_backward(loss)
        loss.backward()
        self._mask_gradients()
        module.on_after_backward()
        if self._has_step_hooks:
            self._mask_gradients()
        delay_gradients(optimizer, self.run.delay)
        module.on_before_optimizer_step(optimizer)
        optimizer.step()
        if self._moves_pruned:
            with torch.no_grad():
                multiply(self._masked)
        return loss.detach()

    def _mask_gradients(self) -> None:
        """Set the gradients of pruned weights to zero."""
        gradients = []
        for parameter, keep in self._masked:
            if parameter.grad is not None:
                gradients.append((parameter.grad, keep))
        multiply(gradients)

    def write_back(self, row: int) -> None:
        """Do nothing: module and optimizer of the run are up to date."""

    def finite(self) -> list[bool]:
        """Return whether all weights are finite, in a list of one."""
        return [weights_finite(self.run.module)]

    def losses(self, rows: Tensor, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """See `NetworkBatch.losses`."""
        with evaluating(self.run.module):
            return self.run.module.summed_loss((x[index[0]], y[index[0]])).double()[None]

    def per_example_error(self, rows: Tensor, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """See `NetworkBatch.per_example_error`."""
        with evaluating(self.run.module):
            return self.run.module.per_example_error((x[index[0]], y[index[0]])).float()[None]
