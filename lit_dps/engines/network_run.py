"""NetworkRun: an attempt in the interval loop, from its start or resume to its checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lit_dps.core.attempt import Attempt, Validation
from lit_dps.core.batch_schedule import RateFactors
from lit_dps.core.errors import ConfigError
from lit_dps.core.trial import SHORT_STEPS, STACKED, Trial
from lit_dps.core.trial_config import PruningConfig
from lit_dps.core.unit import EXAMPLES
from lit_dps.data import ImageData
from lit_dps.data.loaders import interval_batches
from lit_dps.engines.loader_data import LoaderData
from lit_dps.engines.logged_module import training_loss
from lit_dps.engines.module_hooks import optimizer_of, prepare_module
from lit_dps.engines.readable_run import ReadableRun
from lit_dps.engines.schedule_table import table_of_rates
from lit_dps.engines.stackable_loss import trains_on_whole_batches
from lit_dps.engines.trial_settings import PassKey, TrialSettings
from lit_dps.module import ImageClassifier
from lit_dps.optim.clipping import Clipping
from lit_dps.optim.local_sgd import LocalSGD
from lit_dps.optim.weight_average import WeightAverage
from lit_dps.pruning import Mask, Network, mask_flags, prunable, prune, pruner_of
from lit_dps.pruning.mask import multiply
from lit_dps.pruning.mask_changes import MaskChanges, density_flags
from lit_dps.pruning.pruner import Scores, set_unscored_flags
from lit_dps.pruning.start import initialize_pruned
from lit_dps.readings.attempt_readings import AttemptReadings
from lit_dps.training import lightning_private
from lit_dps.training.batch_schedule_callback import apply_batch_schedule
from lit_dps.training.checkpoint_files import CheckpointFile
from lit_dps.training.hidden_state import (
    capture_attributes,
    capture_rng_state,
    preserve_rng_state,
    restore_attributes,
    restore_rng_state,
)
from lit_dps.training.rate_curve import largest_rates, rates_of_groups, schedule_shape
from lit_dps.training.training_pass import copy_of
from lit_dps.training.workload import Built

# Examples in a batch of the scoring pass of stacked runs on a GPU. A step of Simple-CNN takes the
# same 1 ms there for up to 256 examples.
GPU_PASS_BATCH_SIZE = 1000


def build_trial(settings: TrialSettings, trial: Trial) -> tuple[Built, torch.device]:
    """Return the module and data of a trial, set up, and the device on which it trains."""
    built = settings.workload.build(trial)
    trainer = lightning_private.make_trainer(built.trainer)
    lightning_private.set_max_steps(trainer, settings.visible_steps)
    built.data.trainer = trainer  # the setup of a user's data module may read it
    built.data.prepare_data()
    built.data.setup("fit")
    prepare_module(built.module)
    return built, trainer.strategy.root_device


class ValidationOutcome(NamedTuple):
    """The result of the validation of one run at the end of an interval.

    Attributes:
        row: The row of the run in its stack; 0 for a single network.
        snapshot_index: The snapshot that was validated (`NetworkRows.snapshot_index`).
        validation: The result.
    """

    row: int
    snapshot_index: int
    validation: Validation


@dataclass
class NetworkRun(ReadableRun):
    """An attempt in the interval loop, with its network, data and optimizer.

    Attributes:
        attempt: The attempt, which records the validations and decides when the run ends.
        module: The pruned network on its device: an `ImageClassifier`, or another LightningModule
            in a stack.
        data: The data module, set up: `ImageData`, or `LoaderData` in a stack.
        optimizer, schedule: As the module configures them.
        mask: The pruning mask; None at sparsity 0.
        changes: How the mask changes during training; None if it stays.
        pruning: How the network was pruned; None without a mask.
        file: The checkpoint file; None if the run is not saved.
        batches: Training batches, one interval at a time: int64, shape (steps, batch). If
            they differ in size, a tensor for each.
        steps: Optimizer steps so far.
        seconds: Seconds that the run took before it was resumed.
        delay: Delay of the gradients in steps (`lit_dps.optim.delay`).
        local: State of local SGD; None for ordinary training.
        average: The average of the weights, which is validated; None to validate the weights.
        readings: What is measured along the run and at its end; None without readings.
        clipping: The limit of the gradients; None without one.
        rates: The learning rates of the parameter groups at each step, if a table replaces the
            schedule.
        source: The data module of the user, if `data` keeps its batches in memory.
        rate_factors: The factors of the learning rate if it follows the batch size; else None.
        is_resumed: Whether the run continues from its checkpoint.
        keeps_untrained: Whether the loss surely changes no untrained parameter; see
            `lit_dps.engines.stackable_loss`.
    """

    attempt: Attempt
    module: Any
    data: Any
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler | None
    mask: Mask | None
    file: CheckpointFile | None
    batches: Iterator[Tensor | tuple[Tensor, ...]]
    steps: int = 0
    seconds: float = 0.0
    delay: int = 0
    local: LocalSGD | None = None
    average: WeightAverage | None = None
    changes: MaskChanges | None = None
    pruning: PruningConfig | None = None
    readings: AttemptReadings | None = None
    clipping: Clipping | None = None
    rates: Sequence[Sequence[float]] | None = None
    source: LightningDataModule | None = None
    rate_factors: RateFactors | None = None
    is_resumed: bool = False
    keeps_untrained: bool = False

    def __post_init__(self):
        self._begin_seconds = time.monotonic()
        self.saved_at = self._begin_seconds

    @classmethod
    def build_or_resume(
        cls,
        attempt: Attempt,
        built: Built,
        settings: TrialSettings,
        device: torch.device,
        source: LightningDataModule | None = None,
    ) -> NetworkRun:
        """Return the run of an attempt: resumed from its checkpoint if there is one, else new.

        Args:
            attempt: The attempt.
            built: Its module and data, set up. The run takes them over.
            settings: The settings of the study.
            device: Where the network is trained.
            source: The data module of the user, if the data of `built` keep its batches in memory.
        """
        trial = attempt.study_trial
        assert isinstance(built.data, ImageData | LoaderData)
        is_classifier = isinstance(built.module, ImageClassifier)
        if settings.goal.stops_validations_early and is_classifier:
            attempt.enable_early_validations()
        config = settings.resolve(trial)
        apply_batch_schedule(config.batch, built.data)
        if not config.batch.build().is_constant:
            attempt.count(EXAMPLES.column)
        module = built.module.to(device)
        configured = module.configure_optimizers()
        optimizer, schedule = optimizer_of(configured)
        rates = None
        if isinstance(built.data, LoaderData):
            budget = settings.visible_steps
            rates = table_of_rates(module, configured, budget, built.data.steps_of_epoch)
        module.on_fit_start()
        run = cls(
            attempt,
            module,
            built.data,
            optimizer,
            schedule,
            mask=None,
            file=settings.checkpoint_file(attempt, "interval loop"),
            batches=interval_batches(
                built.data.epochs(), built.data.batch_sizes(), attempt.goal.check_interval
            ),
            delay=config.optim.delay,
            clipping=Clipping.of(built.trainer),
            rates=rates,
            source=source,
        )
        rate_factors = config.batch.rate_factors(trial.cell.batch_size)
        if not rate_factors.are_one:
            run.rate_factors = rate_factors
        if config.local.on:
            run.local = LocalSGD(config.local, optimizer)
        if config.optim.average_half_life:
            run.average = WeightAverage(module, config.optim.average_half_life)
        if settings.readings:
            readings = [spec.build() for spec in settings.readings]
            run.readings = AttemptReadings(readings, attempt)
        run.is_resumed = run._resume_from_file()
        return run

    def prune_unless_resumed(
        self, settings: TrialSettings, stacked: bool = False, scores: Scores | None = None
    ) -> None:
        """Prune the network and begin training, unless the run is resumed.

        Args:
            settings: The settings of the study.
            stacked: Whether the run is trained in a stack. Its scoring pass then takes larger
                batches on a GPU, which Lightning's loop does not.
            scores: The pruning scores of the network, if they were computed before.
        """
        if not self.is_resumed:
            self._prune_and_begin(settings, stacked, scores)
        if self.mask is not None:
            self.pruning = settings.resolve(self.attempt.study_trial).pruning
            self.attempt.kept = self.mask.kept()
            self.changes = self._mask_changes(settings)
        if stacked:
            self.attempt.flags = {**self.attempt.flags, STACKED: 1}

    def _mask_changes(self, settings: TrialSettings) -> MaskChanges | None:
        """Return how the mask changes during training; None if it stays.

        Raises:
            ConfigError: if it changes, and the run has workers of local SGD or delayed gradients.
        """
        config = settings.resolve(self.attempt.study_trial).pruning
        pruner = pruner_of(config.method, config.options)
        changes = MaskChanges.of(pruner, config.sparsity, config.seed, settings.visible_steps)
        if changes is not None and (self.local is not None or self.delay):
            reason = f"optim.delay = {self.delay}"
            if self.local is not None:
                reason = f"local.workers = {self.local.schedule.workers}"
            allowed = f"a method whose mask does not change, with {reason}"
            raise ConfigError("pruning.method", config.method, allowed)
        return changes

    def _prune_and_begin(
        self, settings: TrialSettings, stacked: bool, scores: Scores | None
    ) -> None:
        """Prune the network and begin training, with the hooks that Lightning calls."""
        trial = self.attempt.study_trial
        min_batch_size = 0
        is_mean = not trains_on_whole_batches(self.module, self.keeps_untrained)
        if stacked and is_mean and self.module.device.type == "cuda":
            min_batch_size = GPU_PASS_BATCH_SIZE
        self._prune(settings, min_batch_size, scores)
        shape = settings.schedule_shape(trial, partial(self._schedule_shape, settings))
        self.attempt.flags = {**self.attempt.flags, **shape}
        self.module.on_train_start()
        self.module.on_train_epoch_start()
        self._mask_weights()
        if self.average is not None:
            self.average.begin()
        if self.readings is not None:
            self.readings.before(1, self)

    def _prune(self, settings: TrialSettings, min_batch_size: int, scores: Scores | None) -> None:
        """Prune the network as `PruningCallback` does.

        Args:
            settings: The settings of the study.
            min_batch_size: The fewest examples in a batch of the scoring pass, if the mask does not
                depend on it.
            scores: The scores, if they were computed before.
        """
        trial = self.attempt.study_trial
        config = settings.resolve(trial).pruning
        if config.sparsity == 0:
            return
        pruner = pruner_of(config.method, config.options)
        batch_size = config.batch_size
        if pruner.batch_invariant:
            batch_size = max(min_batch_size, batch_size)
        # A pass that a data module of lit_dps makes has an empty key.
        key: PassKey | None = getattr(self.data, "pass_key", ())
        stored = settings.stored_scores(trial)
        if stored is not None and stored[0] == key:
            scores = stored[1]
        make_copy = partial(self.copy_to_prune, config, batch_size)
        self.mask, scores = prune(
            pruner,
            make_copy,
            config.sparsity,
            config.seed,
            name=type(self.module).__name__,
            scores=scores,
        )
        settings.store_scores(trial, key, scores)
        trained_ids = self.trained
        trained = sum(p.numel() for p in self.module.parameters() if id(p) in trained_ids)
        redraw = partial(settings.workload.module, trial)
        start_flags = initialize_pruned(config.init, self.module, self.mask, make_copy, redraw)
        self.attempt.flags = {**mask_flags(self.mask, pruner, trained), **start_flags}

    def _mask_weights(self) -> None:
        """Set the pruned weights to zero, which a hook of the module may have changed."""
        with torch.no_grad():
            multiply(self.masked_parameters())

    def change_mask(
        self, step: int, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> None:
        """Replace the mask after an optimizer step; the caller masks weights and optimizer state.

        Args:
            step: Optimizer steps since the start of the run.
            weights: The masked parameters after the step, by name.
            gradients: Their gradients of the step's batch, also of pruned weights.
        """
        assert self.changes is not None and self.mask is not None
        density = density_flags(self.attempt.flags, step, self.mask)
        self.mask = self.changes.next_mask(step, self.mask, weights, gradients)
        self.attempt.flags = {**self.attempt.flags, **density}
        set_unscored_flags(self.attempt.flags, self.mask)
        self.attempt.kept = self.mask.kept()

    def masked_parameters(self) -> list[tuple[Tensor, Tensor]]:
        """Return each pruned parameter with its mask, which has the parameter's type and device."""
        parameters = dict(self.module.named_parameters())
        pairs = []
        for name, keep in (self.mask or {}).items():
            parameter = parameters[name]
            pairs.append((parameter, keep.to(parameter)))
        return pairs

    def _schedule_shape(self, settings: TrialSettings) -> dict[str, float]:
        """Return the shape of the schedule as `ScheduleCallback` measures it."""
        if self.schedule is None:
            return {}
        budget = settings.visible_steps
        rates = self.rates
        if rates is None:
            config = LRSchedulerConfig(self.schedule, interval="step")
            rates = rates_of_groups(self.optimizer, [config], budget, shared=(self.module,))
        return schedule_shape(largest_rates(rates), budget)

    @contextmanager
    def copy_to_prune(self, config: PruningConfig, batch_size: int) -> Iterator[Network]:
        """Provide a copy of the network for the pruning method.

        Args:
            config: How the network is pruned.
            batch_size: Examples in a batch of the scoring pass.
        """
        names = prunable(self.module, config.biases, config.exclude, self.trained)
        with preserve_rng_state(self.data):
            copy = copy_of(self.module)
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
                loss_of=lambda batch, i: training_loss(copy, batch, i),
            )

    def _pruning_batches(self, batch_size: int) -> Iterator[tuple[Any, int]]:
        """Yield the batches of a scoring pass on the device, each with its number of examples."""
        for batch in self.data.pruning_dataloader(batch_size):
            images = self.data.transfer_batch_to_device(batch, self.module.device)
            yield images, len(batch.index)

    def record(self, validation: Validation) -> None:
        """Record the validation of an interval; the attempt decides how the run continues."""
        self.steps = validation.step
        self._collect_flags()
        self.attempt.record(validation)

    def read_end(self) -> None:
        """Take the readings of the end, which may set flags."""
        assert self.readings is not None
        self.readings.read_end(self.steps, self)
        self._collect_flags()

    def _collect_flags(self) -> None:
        """Store the flags of the readings and of the steps so far in the attempt."""
        if self.readings is not None:
            self.attempt.flags = {**self.attempt.flags, **self.readings.flags}
        if isinstance(self.data, LoaderData):
            short_steps = self.data.short_steps(self.steps)
            if short_steps:
                self.attempt.flags = {**self.attempt.flags, SHORT_STEPS: short_steps}

    def learning_rates(self, step: int) -> Sequence[float]:
        """Return the learning rate of each parameter group at step number `step`, from 0.

        A schedule must be a LambdaLR, unless the run has a table of rates.
        """
        if self.rates is not None:
            return self.rates[min(step, len(self.rates) - 1)]
        if self.schedule is None:
            return [group["lr"] for group in self.optimizer.param_groups]
        assert isinstance(self.schedule, LambdaLR)
        rates = []
        factors = self.schedule.lr_lambdas
        for initial_rate, factor in zip(self.schedule.base_lrs, factors, strict=True):
            rates.append(initial_rate * factor(step))  # pyright: ignore[reportOperatorIssue]
        return rates

    def applied_rates(self, step: int) -> Sequence[float]:
        """Return the rates of `learning_rates` times the factor that follows the batch size."""
        rates = self.learning_rates(step)
        if self.rate_factors is None:
            return rates
        factor = self.rate_factors.at(step)
        return [factor * rate for rate in rates]

    def elapsed_seconds(self) -> float:
        """Return the seconds since the run began, including those before it was resumed."""
        return self.seconds + time.monotonic() - self._begin_seconds

    def save(self) -> None:
        """Write the checkpoint of the run, from which it can be resumed exactly."""
        assert self.file is not None
        state = {
            "about": self.file.identity,
            "global_step": self.steps,
            "seconds": self.elapsed_seconds(),
            "paused": self.attempt.status is not None,
            "run": {"curve": self.attempt.curve, "observed": self.attempt.flags},
            "mask": None,
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": None,
            "generators": capture_rng_state(self.module, self.data),
            "kept": capture_attributes(self.module, self.data),
        }
        if self.mask is not None:
            state["mask"] = dict(self.mask)
        if self.schedule is not None:
            state["schedule"] = self.schedule.state_dict()
        if self.local is not None:
            state["local"] = self.local.state_dict()
        if self.average is not None:
            state["average"] = dict(self.average.tensors)
        if self.readings is not None:
            state["readings"] = self.readings.state_dict()

        def write(path: Path) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, path)

        self.file.write(write, type(self.module).__name__)
        self.saved_at = time.monotonic()

    def _resume_from_file(self) -> bool:
        """Restore the run from its checkpoint; return False if there is no valid one."""
        if self.file is None:
            return False
        path = self.file.find()
        if path is None:
            return False
        # The state is restored after this hook, so that the hook does not change it a second time.
        self.module.on_train_start()
        state = torch.load(path, map_location=self.module.device, weights_only=True)
        with self.file.restoring():
            self._restore(state)
        if not state["paused"]:  # a paused run resumes in every study, which is not reported
            self.file.report(f"{self.file.name} resumes from step {self.steps}")
        return True

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `save` wrote, and skip the batches that were trained on."""
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.local is not None:
            self.local.load_state_dict(state["local"])
        if self.average is not None:
            self.average.load(state["average"])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        if state["mask"] is not None:
            self.mask = Mask(state["mask"])
        self.steps = state["global_step"]
        self.seconds = state["seconds"]
        self.attempt.curve = state["run"]["curve"]
        self.attempt.flags = state["run"]["observed"]
        if self.readings is not None:
            self.readings.load_state_dict(state["readings"])
        restore_rng_state(state["generators"], self.module, self.data)
        for _ in range(self.steps // self.attempt.goal.check_interval):
            next(self.batches)
        restore_attributes(state.get("kept", [None, None]), self.module, self.data, is_resume=True)
