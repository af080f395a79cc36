"""One run of the interval loop: how it starts, trains by itself, is saved and resumes."""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lit_dps.core.attempt import Attempt
from lit_dps.data import ImageData
from lit_dps.data.loaders import Steps
from lit_dps.data.order import steps
from lit_dps.engines.eligible import optimizer_of
from lit_dps.engines.engine import Training
from lit_dps.engines.module_hooks import STEP_HOOKS, NeedsLightning, overridden
from lit_dps.module import ImageClassifier, weights_finite
from lit_dps.optim import OURS, rule_of
from lit_dps.optim.delay import delay_gradients
from lit_dps.optim.local_sgd import LocalSGD
from lit_dps.pruning import Mask, Network, mask_flags, prunable, prune
from lit_dps.pruning.mask import multiply
from lit_dps.pruning.start import start
from lit_dps.training.checkpoint_files import CheckpointFile, Checkpoints
from lit_dps.training.early_check import evaluating
from lit_dps.training.hidden_state import capture_attributes, restore_attributes
from lit_dps.training.local_sgd_callback import SharedTensors, mean_of, part_of
from lit_dps.training.pruning_callback import PruningCallback
from lit_dps.training.rate_curve import rates_of_steps, schedule_shape
from lit_dps.training.rng_state import capture, preserve_rng_state, restore
from lit_dps.training.training_pass import copy_of
from lit_dps.training.workload import Built

# Examples in a batch of the scoring pass of stacked runs on a GPU. A step of Simple-CNN takes the
# same 1 ms there for up to 256 examples.
GPU_PASS_BATCH_SIZE = 1000


class CheckOutcome(NamedTuple):
    """What a check at the end of an interval found for one run; see `Attempt.record`."""

    row: int
    error: float
    exact: bool
    loss: float
    finite: bool
    metrics: Mapping[str, float]


@dataclass
class NetworkRun:
    """An attempt in the interval loop, with its network, data and optimizer.

    Attributes:
        attempt: The attempt, which records the checks and decides when the run ends.
        module: The pruned network on its device.
        data: The data module, set up.
        optimizer, schedule: As the module configures them.
        mask: The pruning mask; None at sparsity 0.
        file: The checkpoint file; None if the run is not saved.
        batches: Training batches, one check interval at a time: int64, shape (steps, batch).
        steps: Optimizer steps so far.
        seconds: Seconds that the run took before it was resumed.
        priority: Priorities of the validation examples (`HardestFirst.priority`) of a resumed run;
            None for a new run.
        delay: Delay of the gradients in steps (`lit_dps.optim.delay`).
        local: State of local SGD; None for ordinary training.
    """

    attempt: Attempt
    module: ImageClassifier
    data: ImageData
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler | None
    mask: Mask | None
    file: CheckpointFile | None
    batches: Iterator[Tensor]
    steps: int = 0
    seconds: float = 0.0
    priority: Tensor | None = None
    delay: int = 0
    local: LocalSGD | None = None

    def __post_init__(self):
        self._begin_seconds = time.monotonic()
        self.saved_at = self._begin_seconds

    @classmethod
    def begin(
        cls,
        attempt: Attempt,
        built: Built,
        training: Training,
        device: torch.device,
        stacked: bool = False,
    ) -> NetworkRun:
        """Return the run of an attempt: resumed from its checkpoint if there is one, else pruned.

        Args:
            attempt: The attempt.
            built: Its module and data, set up. The run takes them over.
            training: The settings of the study.
            device: Where the network is trained.
            stacked: Whether the run is trained in a stack. Its scoring pass then takes larger
                batches on a GPU, which Lightning's loop does not.
        """
        trial = attempt.trial
        assert trial is not None and isinstance(built.data, ImageData)
        checkpoints = training.checkpoints
        file = training.checkpoint_file(attempt, "interval loop")
        checkpoint = None
        if file is not None:
            assert checkpoints is not None
            checkpoint = checkpoints.find(trial, file.about)
        module = built.module.to(device)
        assert isinstance(module, ImageClassifier)
        optimizer, schedule = optimizer_of(module.configure_optimizers())
        module.on_fit_start()
        rounds = training.local_sgd_callback(trial).rounds
        run = cls(
            attempt,
            module,
            built.data,
            optimizer,
            schedule,
            mask=None,
            file=file,
            batches=steps(built.data.epochs(), built.data.batch_size, attempt.goal.check_interval),
            delay=training.delay_callback(trial).delay,
            local=LocalSGD(rounds, optimizer) if rounds.on else None,
        )
        if checkpoint is not None and checkpoints is not None:
            # The state is restored last, so that these hooks do not change it a second time.
            module.on_train_start()
            state = torch.load(checkpoint, map_location=device, weights_only=True)
            run._resume(state, checkpoints)
        else:
            run._prune(training, GPU_PASS_BATCH_SIZE if stacked and device.type == "cuda" else 0)
            shape = training.schedule_shape(trial, partial(run._schedule_shape, training))
            attempt.flags = {**attempt.flags, **shape}
            module.on_train_start()
            module.on_train_epoch_start()
            run._mask_weights()
        attempt.kept = {} if run.mask is None else run.mask.kept()
        return run

    def _prune(self, training: Training, min_batch_size: int) -> None:
        """Prune the network as `PruningCallback` does.

        A method whose mask does not depend on the batches of its scoring pass takes batches of at
        least `min_batch_size` examples.
        """
        trial = self.attempt.trial
        assert trial is not None
        pruning = training.pruning_callback(trial)
        if pruning.sparsity == 0:
            return
        trained_ids = set()
        for group in self.optimizer.param_groups:
            trained_ids.update(id(p) for p in group["params"] if p.requires_grad)
        batch_size = pruning.batch_size
        if pruning.pruner.batch_invariant:
            batch_size = max(min_batch_size, batch_size)
        stored = training.stored_scores(trial)
        make_copy = partial(self._copy, pruning, trained_ids, batch_size)
        self.mask, scores = prune(
            pruning.pruner,
            make_copy,
            pruning.sparsity,
            pruning.seed,
            name=type(self.module).__name__,
            known=None if stored is None else stored[1],
        )
        # The data module makes the scoring pass, so the key of the pass is empty.
        training.store_scores(trial, (), scores)
        trained = 0
        for parameter in self.module.parameters():
            if parameter.requires_grad and id(parameter) in trained_ids:
                trained += parameter.numel()
        start_flags = start(pruning.init, self.module, self.mask, make_copy, pruning.redraw)
        self.attempt.flags = mask_flags(self.mask, pruning.pruner, trained) | start_flags

    def _mask_weights(self) -> None:
        """Set the pruned weights to zero, which a hook of the module may have changed."""
        if self.mask is None:
            return
        parameters = dict(self.module.named_parameters())
        with torch.no_grad():
            multiply(
                [(parameters[name], keep.to(parameters[name])) for name, keep in self.mask.items()]
            )

    def _schedule_shape(self, training: Training) -> dict[str, float]:
        """Return the shape of the schedule as `ScheduleCallback` measures it."""
        if self.schedule is None:
            return {}
        config = LRSchedulerConfig(self.schedule, interval="step")
        budget = training.budget or training.goal.max_steps
        rates = rates_of_steps(self.optimizer, [config], budget, shared=(self.module,))
        return schedule_shape(rates, budget)

    @contextmanager
    def _copy(
        self, pruning: PruningCallback, trained_ids: Container[int], batch_size: int
    ) -> Iterator[Network]:
        """Provide a copy of the network for the pruning method."""
        names = prunable(self.module, pruning.biases, pruning.exclude, trained_ids)
        with preserve_rng_state(self.data):
            copy = cast(ImageClassifier, copy_of(self.module))
            # As in `TrainingPass.without_side_effects`: the loss may need these hooks.
            copy.on_train_start()
            copy.on_train_epoch_start()
            parameters = dict(copy.named_parameters())
            yield Network(
                module=copy,
                parameters={name: parameters[name] for name in names},
                batch_size=batch_size,
                length=lambda: len(self.data.pruning_dataloader(batch_size)),
                batches=partial(self._pruning_batches, batch_size),
                loss_of=lambda batch, i: copy.loss(batch),
            )

    def _pruning_batches(self, batch_size: int) -> Iterator[tuple[Any, int]]:
        """Yield the batches of a scoring pass on the device, each with its number of examples."""
        for batch in self.data.pruning_dataloader(batch_size):
            images = self.data.transfer_batch_to_device(batch, self.module.device)
            yield images, len(batch[1])

    def record(self, outcome: CheckOutcome) -> None:
        """Record the check at the end of an interval; the attempt decides how the run continues."""
        self.steps += self.attempt.goal.check_interval
        self.attempt.record(
            self.steps,
            outcome.error,
            outcome.exact,
            outcome.loss,
            outcome.finite,
            outcome.metrics,
        )

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of step number `step`, from 0; a schedule must be a LambdaLR."""
        if self.schedule is None:
            return self.optimizer.param_groups[0]["lr"]
        assert isinstance(self.schedule, LambdaLR)
        initial_rate: Any = self.schedule.base_lrs[0]
        return initial_rate * self.schedule.lr_lambdas[0](step)

    def elapsed_seconds(self) -> float:
        """Return the seconds since the run began, including those before it was resumed."""
        return self.seconds + time.monotonic() - self._begin_seconds

    def save(self, priority: Tensor) -> None:
        """Write the checkpoint of the run, from which it can be resumed exactly.

        Args:
            priority: Priorities of the validation examples, shape (examples,).
        """
        assert self.file is not None
        state = {
            "about": self.file.about,
            "global_step": self.steps,
            "seconds": self.elapsed_seconds(),
            "paused": self.attempt.status is not None,
            "run": {"curve": self.attempt.curve, "observed": self.attempt.flags},
            "mask": None if self.mask is None else dict(self.mask),
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "priority": priority,
            "generators": capture(self.module, self.data),
            "kept": capture_attributes(self.module, self.data),
        }
        if self.local is not None:
            state["local"] = self.local.state_dict()

        def write(path: Path) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, path)

        self.file.write(write, type(self.module).__name__)
        self.saved_at = time.monotonic()

    def _resume(self, state: Mapping[str, Any], checkpoints: Checkpoints) -> None:
        """Continue from the state that `save` wrote."""
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.local is not None:
            self.local.load_state_dict(state["local"])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        if state["mask"] is not None:
            self.mask = Mask(state["mask"])
        self.steps = state["global_step"]
        self.seconds = state["seconds"]
        self.priority = state["priority"]
        self.attempt.curve = state["run"]["curve"]
        self.attempt.flags = state["run"]["observed"]
        restore(state["generators"], self.module, self.data)
        past_intervals = self.steps // self.attempt.goal.check_interval
        next(islice(self.batches, past_intervals, past_intervals), None)  # skips these batches
        restore_attributes(state.get("kept", [None, None]), self.module, self.data)
        if not state["paused"] and self.file is not None:  # pauses are part of every study
            checkpoints.say(f"{self.file.about['name']} resumes from step {self.steps}")


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
        parameters = dict(run.module.named_parameters())
        self._masked = []
        for name, keep in (run.mask or {}).items():
            parameter = parameters[name]
            self._masked.append((parameter, keep.to(parameter)))
        # Our own rules do not move weights with masked gradients. Another rule may move any weight,
        # for example by noise, and so may a hook.
        self._has_step_hooks = bool(overridden(run.module, STEP_HOOKS))
        self._moves_pruned = rule_of(run.optimizer) not in OURS or self._has_step_hooks
        self._trainable = self._find_trainable()
        self._local: tuple[LocalSGD, SharedTensors] | None = None
        if run.local is not None:
            self._local = run.local, SharedTensors(run.module, run.optimizer, run.local.rounds)

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
