"""LocalSGDCallback: trains a module by local SGD, with all workers in one process or on ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as stock
from torch import Tensor, nn
from torch.optim import Optimizer

import lit_dps.training.lightning_private as lightning_private
from lit_dps.core.errors import ConfigError
from lit_dps.core.local_sgd import LocalSGDSchedule
from lit_dps.optim.local_sgd import LocalSGD
from lit_dps.optim.parameter_groups import group_settings, trained_parameters
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP, unsharded
from lit_dps.parallel.example_count import DIVISIBLE, can_be_cut, cut
from lit_dps.training.delay_callback import DelayCallback, requires_closure
from lit_dps.training.example_count import examples_of, examples_of_part, record_batches
from lit_dps.training.step_count import sizes_of_loader
from lit_dps.training.training_pass import loss_of_output

KEY = "local.workers"

# These callbacks read the weights after every step, when the module holds one worker.
_WEIGHT_AVERAGING = (stock.WeightAveraging, stock.StochasticWeightAveraging)


class LocalSGDCallback(Callback):
    """Train n networks on parts of every batch, and average them every H steps.

    This is local SGD (Stich 2019), and DiLoCo with an outer optimizer; see
    `lit_dps.optim.local_sgd`. The batch size B counts the examples of all workers: each takes B / n
    examples, the same as a rank of its number would (`lit_dps.parallel.ddp.ShardLoader`). One
    step is one local step of all workers. Schedules, clipping and masks act on each of them. One
    process trains all workers one by one; with several ranks, each rank trains an equal number.
    Ranks communicate only when workers meet and at validations. The numbers are the same up to
    rounding.

    Between two steps the module holds the weights of one worker, and so does a file of weights that
    is saved then. It holds the mean of the workers at a validation, in a checkpoint of a study, and
    after training (`LocalSGD.show`).

    Args:
        workers, steps, start, outer_learning_rate, outer_momentum, outer_nesterov:
            Keys of the section `local` (`lit_dps.core.local_sgd.LocalSGDSchedule`).

    Attributes:
        schedule: The number of workers, and when they meet.

    Raises:
        ConfigError: if a value is out of its range. When training starts, or at the first steps: if
            the module, its optimizer or the trainer does something that would differ between one
            process and ranks. Examples are manual optimization, closures, accumulated batches, loss
            scaling, stale gradients, running statistics of batch normalization, and a batch that n
            does not divide.
    """

    def __init__(
        self,
        workers: int = 1,
        steps: int = 1,
        start: int = 0,
        outer_learning_rate: float = 1.0,
        outer_momentum: float = 0.0,
        outer_nesterov: bool = True,
    ):
        self.schedule = LocalSGDSchedule(
            workers, steps, start, outer_learning_rate, outer_momentum, outer_nesterov
        )
        self._reset()

    @classmethod
    def of(cls, schedule: LocalSGDSchedule) -> Self:
        """Return the callback of a schedule."""
        return cls(**vars(schedule))

    @property
    def rounds(self) -> LocalSGDSchedule:
        raise AttributeError("LocalSGDCallback.rounds is now schedule")

    def _reset(self) -> None:
        self._workers: LocalSGD | None = None
        self._restored: dict[str, Any] | None = None  # state from a checkpoint
        self._is_updating = False  # whether a worker's update is running
        self._worker: int | None = None  # the worker that is updated; None in a synchronous step
        self._losses: list[Tensor] = []  # of the workers, in this step
        self._expected_weights: list[Tensor] = []  # after the last step or validation
        self._shown_step = -1  # the last step after which the module held the mean

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # a checkpoint is loaded after this
            record_batches(trainer)
            self._reset()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.schedule.on:
            return
        self._check_support(trainer, pl_module)
        per_rank = self.schedule.workers // ranks.world()
        first = ranks.rank() * per_rank
        optimizer = trainer.optimizers[0]
        self._workers = LocalSGD(
            self.schedule, optimizer, range(first, first + per_rank), ranks.all_reduce_sum
        )
        if self._restored is not None:
            self._workers.load_state_dict(self._restored)
        self._shared = SharedTensors(pl_module, optimizer, self.schedule)
        strategy = trainer.strategy
        strategy.optimizer_step = partial(
            self._step_workers, strategy, strategy.optimizer_step, self._workers
        )
        strategy.training_step = partial(
            self._train_on_part, trainer, strategy.training_step, self._workers
        )

    def _error(self, allowed: str) -> ConfigError:
        return ConfigError(KEY, self.schedule.workers, allowed)

    def _check_support(self, trainer: Trainer, module: LightningModule) -> None:
        """Raise ConfigError for a training that workers cannot do independently."""
        if not module.automatic_optimization:
            name = type(module).__name__
            raise self._error(f"1 for {name}, which steps its optimizers itself")
        optimizer = trainer.optimizers[0]
        if requires_closure(optimizer):
            name = type(optimizer).__name__
            raise self._error(f"1 for {name}, which evaluates the loss itself in a step")
        if self.schedule.workers % ranks.world():
            raise self._error(f"a multiple of the {ranks.world()} ranks that train together")
        batches = trainer.accumulate_grad_batches
        if batches != 1:
            raise self._error(f"1 with trainer.accumulate_grad_batches = {batches}")
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            precision = trainer.precision
            raise self._error(f"1 with trainer.precision = {precision}: it scales one loss for all")
        for callback in lightning_private.callbacks_of(trainer):
            self._check_callback(callback)
        self._check_last_batch(unsharded(trainer.train_dataloader))

    def _check_callback(self, callback: Callback) -> None:
        name = type(callback).__name__
        if isinstance(callback, _WEIGHT_AVERAGING):
            raise self._error(f"1 with {name}, which averages weights after every step")
        if isinstance(callback, DelayCallback) and callback.delay:
            delay = callback.delay
            raise self._error(f"1 with optim.delay = {delay}: its gradients wait for one network")
        if getattr(callback, "measures_one_network", False):
            raise self._error(f"1 with {name}, which follows the steps of one network")

    def _check_last_batch(self, loader: Any) -> None:
        """Raise ConfigError if the last batch of an epoch is short and cannot be divided."""
        if not getattr(loader, "drop_last", False):
            name = "the last batch of an epoch, unless the loader has drop_last"
            self._check_divides(sizes_of_loader(loader).short_batch_examples, name)

    def _check_divides(self, examples: int, batch_name: str) -> None:
        if examples % self.schedule.workers:
            raise self._error(f"a divisor of the {examples} examples of {batch_name}")

    def _step_workers(
        self,
        strategy: Any,
        optimizer_step: Callable[..., Any],
        workers: LocalSGD,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Take a step of all workers, in place of the strategy's `optimizer_step`."""
        self._shared.check_weights(self._expected_weights)
        self._losses = []
        settings = _group_settings(optimizer)
        results = []

        def update(worker: int | None) -> None:
            self._worker = worker
            self._is_updating = True
            results.append(optimizer_step(optimizer, closure, model, **kwargs))
            self._is_updating = False
            if _group_settings(optimizer) != settings:
                name = type(optimizer).__name__
                raise self._error(f"1 for {name}, which keeps state in its groups")

        if workers.is_local and isinstance(strategy, SharedBatchDDP):
            strategy.stop_reducing_gradients()
        workers.step(update)
        self._expect_weights(workers)
        if workers.steps == 1:
            self._shared.raise_if_changed()
        return results[-1]

    def _train_on_part(
        self,
        trainer: Trainer,
        training_step: Callable[..., Any],
        workers: LocalSGD,
        batch: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Take the loss of the worker's part, in place of the strategy's `training_step`."""
        name = type(trainer.lightning_module).__name__
        if not self._is_updating:
            raise self._error(
                f"1 for {name}, which takes its loss outside of a step of its optimizer"
            )
        part = self._part(batch, trainer, workers)
        output = training_step(part, *args, **kwargs)
        loss = loss_of_output(output)
        if loss is None:
            raise self._error(f"1 for {name}, which skips batches without a loss")
        self._losses.append(loss.detach())
        return output

    def _part(self, batch: Any, trainer: Trainer, workers: LocalSGD) -> Any:
        """Return the examples of a batch, or of this rank's part of it, for the current worker."""
        examples = examples_of(trainer, batch)
        of_rank = examples_of_part(trainer, batch)
        if of_rank == 0:
            # A rank without a part of the batch gets one example with weight 0.
            of_rank = 1
        if not can_be_cut(batch, of_rank):
            raise self._error(f"1. More workers need {DIVISIBLE}")
        assert examples is not None and of_rank is not None
        self._check_divides(examples, "a training batch")
        if self._worker is None:
            return batch
        per_rank = len(workers.ours)
        return part_of(batch, self._worker % per_rank, per_rank, of_rank)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if isinstance(outputs, dict) and len(self._losses) > 1:
            # Later callbacks expect the loss of the whole batch.
            outputs["loss"] = mean_of(self._losses)

    def show(self) -> None:
        """Give the module the mean of its workers until the next step. Call it on all ranks."""
        if self._workers is None or self._shown_step == self._workers.steps:
            return
        self._shared.raise_if_changed()
        self._workers.show()
        self._expect_weights(self._workers)
        self._shown_step = self._workers.steps

    def _expect_weights(self, workers: LocalSGD) -> None:
        self._expected_weights = [parameter.detach().clone() for parameter in workers.parameters]

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.show()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.show()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._workers is not None:
            for name in ("optimizer_step", "training_step"):
                vars(trainer.strategy).pop(name, None)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the mean as the module's weights. `state_dict` saves the weights of the workers."""
        if self._workers is None:
            return
        self.show()
        state = checkpoint["state_dict"]
        for name, mean in pl_module.named_parameters(remove_duplicate=False):
            if name in state:
                state[name] = mean.detach()

    def state_dict(self) -> dict[str, Any]:
        if self._workers is None:
            return {}
        state = self._workers.state_dict()
        all_workers = {}
        for workers_of_rank in ranks.all_gather(state["workers"]):
            all_workers.update(workers_of_rank)
        return {**state, "workers": all_workers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict or None


class SharedTensors:
    """Checks that training changes none of the tensors that the workers of a network share.

    These are all tensors that no optimizer trains. One process holds them once, but each of several
    ranks has a copy: if they changed, results would depend on the number of ranks.

    Args:
        module: The network.
        optimizer: Its optimizer.
        schedule: The schedule of local SGD, for errors.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, schedule: LocalSGDSchedule):
        self.module = module
        self.schedule = schedule
        self._trained = trained_parameters(optimizer)
        self._before = {name: tensor.detach().clone() for name, tensor in self._tensors()}

    def _tensors(self) -> list[tuple[str, Tensor]]:
        trained = {id(parameter) for parameter in self._trained}
        named = [*self.module.named_buffers(), *self.module.named_parameters()]
        return [(name, tensor) for name, tensor in named if id(tensor) not in trained]

    def raise_if_changed(self) -> None:
        """Raise ConfigError if a shared tensor has changed since the beginning."""
        for name, tensor in self._tensors():
            if name not in self._before or not _are_equal(tensor, self._before[name]):
                raise self._error(
                    f", which changes {name} in training, as batch normalization its running "
                    "statistics"
                )

    def check_weights(self, expected: Sequence[Tensor]) -> None:
        """Raise ConfigError if trained parameters have changed; no expected tensors match any."""
        if not expected:
            return
        for parameter, before in zip(self._trained, expected, strict=True):
            if not _are_equal(parameter, before):
                raise self._error(
                    ", whose weights something else than the optimizer moves, between two steps"
                )

    def _error(self, reason: str) -> ConfigError:
        name = type(self.module).__name__
        return ConfigError(KEY, self.schedule.workers, f"1 for {name}{reason}")


def part_of(batch: Any, i: int, n: int, examples: int) -> Any:
    """Return the i-th of n equal parts of a batch that can be cut."""
    if n == 1:
        return batch
    return cut(batch, slice(i * examples // n, (i + 1) * examples // n))


def mean_of(losses: Sequence[Tensor]) -> Tensor:
    """Return the mean loss of workers; the unchanged loss of a single one."""
    if len(losses) == 1:
        return losses[0]
    return torch.stack(list(losses)).mean()


def show_mean(trainer: Trainer) -> None:
    """Give the module the mean of its workers, if it trains by local SGD (`LocalSGD.show`)."""
    for callback in lightning_private.callbacks_of(trainer, LocalSGDCallback):
        callback.show()


def _group_settings(optimizer: Optimizer) -> list[str]:
    """Return the settings of each parameter group as text, which is easy to compare."""
    return [repr(group_settings(group)) for group in optimizer.param_groups]


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are equal, where NaN equals NaN."""
    if torch.equal(one, other):
        return True
    return bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
