"""Member: a run of the interval loop, and what it has of its own."""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from lit_dps.core.attempt import Attempt
from lit_dps.data import ImageData
from lit_dps.data.order import steps
from lit_dps.engines.eligible import optimizer_of
from lit_dps.engines.engine import Training
from lit_dps.module import ImageClassifier
from lit_dps.optim.local_sgd import LocalSGD
from lit_dps.pruning import Mask, Network, mask_flags, prunable, prune
from lit_dps.pruning.start import start
from lit_dps.training.checkpoint_files import CheckpointFile, Checkpoints
from lit_dps.training.hidden_state import capture_attributes, restore_attributes
from lit_dps.training.pruning_callback import PruningCallback
from lit_dps.training.rate_curve import rates_of_steps, schedule_shape
from lit_dps.training.rng_state import capture, preserve_rng_state, restore
from lit_dps.training.training_pass import copy_of
from lit_dps.training.workload import Built

# examples a batch of a pass on a GPU: up to 256 a step of Simple-CNN takes the same 1 ms there
PASS = 1000


@dataclass
class NetworkRun:
    """A run in the interval loop.

    Attributes:
        run: The run.
        module: Its network, pruned, on its device.
        data: Its data, set up.
        optimizer, schedule: As the module configures them.
        mask: What is kept; None at sparsity 0.
        file: Where it is saved; None if it is not.
        batches: Its training batches, a check interval at a time: int64, shape (steps, batch).
        steps: Optimizer steps so far.
        seconds: What it took before it was taken up.
        priority: Of its checks, as they were left (`HardestFirst.priority`); None for a new run.
        delay: Of its gradients, in steps (`lit_dps.optim.delay`).
        local: The workers that train it; None for the usual one.
    """

    run: Attempt
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
        self._began = self.saved = time.monotonic()

    @classmethod
    def begin(
        cls,
        run: Attempt,
        built: Built,
        training: Training,
        device: torch.device,
        stacked: bool = False,
    ) -> NetworkRun:
        """Prunes the network of a run and puts it on its way; where the run was saved, it goes on
        from there.

        One that is `stacked` need not be equal to Lightning's to the bit: on a GPU its pass takes
        larger batches.
        """
        file, checkpoints = training.file_of(run, "interval loop"), training.checkpoints
        saved = None if file is None else checkpoints.find(run.trial, file.about)
        module = built.module.to(device)
        optimizer, schedule = optimizer_of(module.configure_optimizers())
        module.on_fit_start()
        batches = steps(built.data.epochs(), built.data.batch_size, run.goal.check_interval)
        delay, rounds = training.delay_of(run.trial).delay, training.local_of(run.trial).rounds
        local = LocalSGD(rounds, optimizer) if rounds.on else None
        member = cls(
            run,
            module,
            built.data,
            optimizer,
            schedule,
            None,
            file,
            batches,
            delay=delay,
            local=local,
        )
        if saved is not None:
            member._go_on(torch.load(saved, map_location=device, weights_only=True), checkpoints)
        else:
            member._prune(training, PASS if stacked and device.type == "cuda" else 0)
            shape = training.schedule_of(run.trial, partial(member._schedule_shape, training))
            run.flags = {**run.flags, **shape}
        run.kept = member.mask.kept() if member.mask is not None else {}
        return member

    def _prune(self, training: Training, at_least: int) -> None:
        """As `PruningCallback` does it, but for a pass in batches of so many examples, if any
        do."""
        trial, pruning = self.run.trial, training.pruning_of(self.run.trial)
        if pruning.sparsity == 0:
            return
        held = {
            id(p)
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.requires_grad
        }
        _, known = training.known_scores(trial) or ((), None)
        size = max(at_least, pruning.batch_size) if pruning.pruner.sums else pruning.batch_size
        name, copy = type(self.module).__name__, partial(self._copy, pruning, held, size)
        self.mask, scores = prune(pruning.pruner, copy, pruning.sparsity, pruning.seed, name, known)
        training.keep_scores(trial, (), scores)  # the pass of the data module's own
        trained = sum(
            p.numel() for p in self.module.parameters() if p.requires_grad and id(p) in held
        )
        found = start(pruning.init, self.module, self.mask, copy, pruning.redraw)
        self.run.flags = mask_flags(self.mask, pruning.pruner, trained) | found

    def _schedule_shape(self, training: Training) -> dict[str, float]:
        """Return the shape as `ScheduleCallback` measures it. The schedule is stepped once a
        step."""
        if self.schedule is None:
            return {}
        config = LRSchedulerConfig(self.schedule, interval="step")
        budget = training.budget or training.goal.max_steps
        return schedule_shape(
            rates_of_steps(self.optimizer, [config], budget, shared=(self.module,)), budget
        )

    @contextmanager
    def _copy(self, pruning: PruningCallback, held: Container[int], size: int) -> Iterator[Network]:
        names = prunable(self.module, pruning.biases, pruning.exclude, held)
        with preserve_rng_state(self.data):
            twin = copy_of(self.module)
            found = dict(twin.named_parameters())
            yield Network(
                module=twin,
                parameters={name: found[name] for name in names},
                batch_size=size,
                length=lambda: len(self.data.pruning_dataloader(size)),
                batches=partial(self._pass, size),
                loss_of=lambda batch, i: twin.loss(batch),
            )

    def _pass(self, batch_size: int) -> Iterator[tuple[tuple[Tensor, Tensor], int]]:
        for batch in self.data.pruning_dataloader(batch_size):
            yield self.data.transfer_batch_to_device(batch, self.module.device), len(batch[1])

    def judge(
        self, error: float, exact: bool, loss: float, finite: bool, metrics: Mapping[str, float]
    ) -> None:
        """Takes in the check at the end of an interval; arguments as of `Attempt.record`."""
        self.steps += self.run.goal.check_interval
        self.run.record(self.steps, error, exact, loss, finite, metrics)

    def rate(self, step: int) -> float:
        """The learning rate of update number `step`, counted from 0; of schedules a `LambdaLR`
        alone."""
        if self.schedule is None:
            return self.optimizer.param_groups[0]["lr"]
        return self.schedule.base_lrs[0] * self.schedule.lr_lambdas[0](step)

    def took(self) -> float:
        """Seconds since the run began, also before it was taken up."""
        return self.seconds + time.monotonic() - self._began

    def save(self, priority: Tensor) -> None:
        """Writes the run's checkpoint, to be gone on from exactly."""
        state = {
            "about": self.file.about,
            "global_step": self.steps,
            "seconds": self.took(),
            "paused": self.run.status is not None,
            "run": {"curve": self.run.curve, "observed": self.run.flags},
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
        self.saved = time.monotonic()

    def _go_on(self, state: Mapping[str, Any], checkpoints: Checkpoints) -> None:
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.local is not None:
            self.local.load_state_dict(state["local"])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        self.mask = None if state["mask"] is None else Mask(state["mask"])
        self.steps, self.seconds, self.priority = (
            state["global_step"],
            state["seconds"],
            state["priority"],
        )
        self.run.curve, self.run.flags = state["run"]["curve"], state["run"]["observed"]
        restore(state["generators"], self.module, self.data)
        next(islice(self.batches, skip := self.steps // self.run.goal.check_interval, skip), None)
        restore_attributes(state.get("kept", [None, None]), self.module, self.data)
        if not state["paused"]:  # a pause is no news
            checkpoints.say(f"{self.file.about['name']} resumes from step {self.steps}")
