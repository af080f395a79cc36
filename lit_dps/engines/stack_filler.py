"""StackFiller: finds the attempts that train in one stack, and begins their runs.

Attempts train in one stack if their keys and their modules are equal: `batching_key` compares
attempts before they are built, `StackFiller` compares their modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils._pytree import tree_map

from lit_dps.core.attempt import Attempt
from lit_dps.core.search_space import RATE_NAMES
from lit_dps.data import ImageData
from lit_dps.engines.eligible import reason_of
from lit_dps.engines.functional import Functional
from lit_dps.engines.memory import is_out_of_memory
from lit_dps.engines.module_hooks import show_length
from lit_dps.engines.network_run import NetworkRun, build_trial
from lit_dps.engines.stackable_loss import (
    TRIED_EXAMPLES,
    changes_in_steps,
    equal_with_nan,
    keeps_untrained,
)
from lit_dps.engines.stackable_module import COMPARED_STEPS, LoggedReference, kind_of, loader_data
from lit_dps.engines.stacked_scores import scores_of_new_runs
from lit_dps.engines.trial_settings import NextAttempt, TrialSettings
from lit_dps.module import ImageClassifier
from lit_dps.optim import BUILT_IN
from lit_dps.training.hidden_state import preserve_rng_state
from lit_dps.training.workload import Built

# Parameters of the learning rate and its schedule, which may differ between networks of a stack.
RATE_KEYS = frozenset(
    {
        "model.learning_rate",
        "model.decay_steps",
        "model.end_factor",
        "model.warmup_steps",
        "model.decay_share",
    }
)

# Examples whose loss shows whether two modules differ in more than their weights. Modules of a
# stack have equal arguments except for rates, so a difference appears in the loss of any example.
# In float64, 2 examples of Simple-CNN take 1 ms of CPU. Batch normalization needs two.
COMPARED_EXAMPLES = 2
# Relative tolerance of that loss in float64. A penalty of weight 1e-6 changes it by 1e-5.
LOSS_TOLERANCE = 1e-9
# Reason of an attempt whose module differs from the first module of its stack.
DIFFERENT_MODULE = (
    "its module or data differ from the other trials of the stack in more than weights"
)
# Reason of an attempt for which no stack has room.
NO_MEMORY = "memory is insufficient for a stack"


class BatchingKey(NamedTuple):
    """The properties that all attempts of a stack share; equal keys may train together.

    Attributes:
        cell: The batch size and the values of all axes except the axes of pruning.
        kind: The values that decide which loop can train the attempt.
        numbers: The other values, all of them numbers.
    """

    cell: tuple
    kind: tuple
    numbers: tuple

    @property
    def loop_key(self) -> tuple:
        """What decides which loop can train the attempt."""
        return self.cell, self.kind


def batching_key(attempt: Attempt) -> BatchingKey:
    """Return the batching key of an attempt.

    The networks of a stack may differ in weights, mask, learning rate and hyperparameters. All
    other arguments of the module and the data must be equal, such as the arguments of a loss.
    """
    trial = attempt.study_trial
    network_keys = set(RATE_KEYS)
    # A rule of the user may have a hyperparameter that is named like an argument of the loss.
    for rule in BUILT_IN:
        network_keys.update(f"model.{name}" for name in rule.hyperparameters)
    kind: list[tuple[str, bool | str]] = []
    numbers: list[tuple[str, float]] = []
    for key, value in sorted(trial.params.items()):
        if key in network_keys or key.rpartition(".")[2] in RATE_NAMES:
            continue
        if isinstance(value, float) and not key.startswith("local."):
            # Zero turns a feature off, as in `dropout: 0.0`, which decides on the loop.
            kind.append((key, value != 0))
            numbers.append((key, value))
        else:
            kind.append((key, repr(value)))
    cell = trial.cell.batch_size, trial.cell.stack_axes
    return BatchingKey(cell, tuple(kind), tuple(numbers))


class AttemptQueue:
    """The attempts in the order of the study, with a look ahead for equal keys.

    Args:
        next_attempt: Returns the next attempt of the study, or None at its end.
        max_waiting: Attempts that may wait while an attempt with another key is sought.
    """

    def __init__(self, next_attempt: NextAttempt, max_waiting: int):
        self._next_attempt = next_attempt
        self._max_waiting = max_waiting
        self._waiting: list[Attempt] = []

    def next(self) -> Attempt | None:
        """Return the next attempt, or None if no attempt remains at present."""
        if self._waiting:
            return self._waiting.pop(0)
        return self._next_attempt()

    def next_with(self, key: BatchingKey) -> Attempt | None:
        """Return the next attempt with this key, unless one of another cell comes first."""
        index = self._index(key)
        if index is None:
            return None
        return self._waiting.pop(index)

    def has(self, key: BatchingKey) -> bool:
        """Return True if `next_with` has an attempt."""
        return self._index(key) is not None

    def _index(self, key: BatchingKey) -> int | None:
        """Return the place of the next attempt with this key among the waiting ones."""
        for index in range(self._max_waiting):
            if index == len(self._waiting):
                attempt = self._next_attempt()
                if attempt is None:
                    return None
                self._waiting.append(attempt)
            candidate = batching_key(self._waiting[index])
            if candidate == key:
                return index
            if candidate.cell != key.cell:
                return None
        return None


class Unstacked(NamedTuple):
    """An attempt that leaves its stack and trains as a single network.

    Attributes:
        attempt: The attempt, which begins again.
        reason: Why it leaves the stack, for `TrialResult.engine_reason`.
    """

    attempt: Attempt
    reason: str


class StackFiller:
    """Begins the runs that train in one stack.

    Args:
        first: The first attempt. The others must have its key and its module.
        queue: The further attempts.
        settings: The settings of the study.

    Attributes:
        lacks_memory: Whether memory was insufficient for the last runs that were to begin.
        unstacked: Attempts to train one at a time afterwards. Their modules differ from the first
            one, or an error occurred in the stack. The attempt that caused it raises it again, and
            becomes a failed trial.
    """

    def __init__(self, first: Attempt, queue: AttemptQueue, settings: TrialSettings):
        self.unstacked: list[Unstacked] = []
        self.lacks_memory = False
        self._pending = [first]
        self._key = batching_key(first)
        self._queue = queue
        self._settings = settings
        self._reference: _Reference | LoggedReference | None = None

    @property
    def has_pending(self) -> bool:
        """Whether attempts wait that were claimed from the queue for this stack."""
        return bool(self._pending)

    def next_runs(self, count: int) -> list[NetworkRun]:
        """Begin the next attempts that fit into the stack, or resume them from their checkpoints.

        Sets `lacks_memory`.

        Returns:
            `count` runs, or fewer if there are no more, or if memory is insufficient.
        """
        self.lacks_memory = False
        runs: list[NetworkRun] = []
        while len(runs) < count and not self.lacks_memory:
            new_runs = self._build_runs(count - len(runs))
            if not new_runs:
                break
            scores = scores_of_new_runs(new_runs, self._settings)
            for run, scores_of_run in zip(new_runs, scores, strict=True):
                try:
                    run.prune_unless_resumed(self._settings, stacked=True, scores=scores_of_run)
                except Exception as error:
                    self.on_error(run.attempt, error)
                else:
                    runs.append(run)
        return runs

    def _build_runs(self, count: int) -> list[NetworkRun]:
        """Return the next runs before their start: `count`, or fewer if there are no more."""
        runs: list[NetworkRun] = []
        while len(runs) < count and not self.lacks_memory:
            attempt = self._pending.pop() if self._pending else self._queue.next_with(self._key)
            if attempt is None:
                break
            try:
                run = self._build_run(attempt)
            except Exception as error:
                self.on_error(attempt, error)
                continue
            if run is None:
                self.unstacked.append(Unstacked(attempt, DIFFERENT_MODULE))
            else:
                runs.append(run)
        return runs

    def put_back(self, attempts: Sequence[Attempt]) -> None:
        """Restart attempts, and queue them for the next stack."""
        for attempt in reversed(attempts):
            attempt.restart()
            self._pending.append(attempt)

    def on_error(self, attempt: Attempt, error: Exception) -> None:
        """Put an attempt back if memory is insufficient to begin it, else unstack it."""
        if is_out_of_memory(error):
            self.lacks_memory = True
            self.put_back([attempt])
        else:
            self.unstack_after_error(attempt, error)

    def unstack_pending(self) -> None:
        """Train the pending attempts one at a time afterwards: none of them fits into a stack."""
        for attempt in self._pending:
            self.unstacked.append(Unstacked(attempt, NO_MEMORY))
        self._pending.clear()

    def unstack_after_error(self, attempt: Attempt, error: Exception) -> None:
        """Restart an attempt after an error in its stack, and train it one at a time afterwards."""
        attempt.restart()
        self.unstacked.append(Unstacked(attempt, f"its stack raised an error: {reason_of(error)}"))

    def _build_run(self, attempt: Attempt) -> NetworkRun | None:
        """Return the run of an attempt; None if its module differs from the first module."""
        trial = attempt.study_trial
        # Data may be drawn when they are set up: from the seed of the point, as in other loops.
        with preserve_rng_state(seed=trial.seed_for("order")):
            built, device = build_trial(self._settings, trial)
            is_classifier = isinstance(built.module, ImageClassifier)
            source = None
            if not is_classifier:
                data = loader_data(built, device, self._settings, trial)
                steps = self._settings.visible_steps
                show_length(built.module, steps, data.steps_of_epoch)
                source = built.data
                built = replace(built, data=data)
            if self._reference is None and is_classifier:
                self._reference = _Reference(built, device)
            elif self._reference is None:
                self._reference = LoggedReference(built, device, self._settings)
            elif not self._reference.equals(built):
                return None
            run = NetworkRun.build_or_resume(attempt, built, self._settings, device, source)
            run.keeps_untrained = self._reference.keeps_untrained
            return run


class _Reference:
    """The first module of a stack, with which the modules of the other attempts are compared.

    The modules may have different arguments of rate, schedule and update rule. A loss may read such
    an argument too. The comparison notices it if the argument changes one of the first
    `COMPARED_STEPS` losses, or a buffer. It does not notice an argument that acts from a later step
    on, such as a penalty that begins after `warmup_steps` steps.

    Args:
        built: The module and its data, set up.
        device: Where the modules are compared.

    Attributes:
        keeps_untrained: Whether the loss changes no untrained parameter.
    """

    def __init__(self, built: Built, device: torch.device):
        assert isinstance(built.data, ImageData)
        x, y = built.data.on_device("train", device)
        module = built.module.to(device)
        self.keeps_untrained = keeps_untrained(module, (x[:TRIED_EXAMPLES], y[:TRIED_EXAMPLES]))
        self._batch = tree_map(_to_double, (x[:COMPARED_EXAMPLES], y[:COMPARED_EXAMPLES]))
        self._device = device
        self._images = built.data.images
        self._kind = kind_of(built)
        self._parameters = _double_copies(module.named_parameters())
        self._buffers = _double_copies(module.named_buffers())
        self._values = self._values_of(built.module)

    def equals(self, built: Built) -> bool:
        """Return True if a module equals the first module except for its weights."""
        assert isinstance(built.data, ImageData)
        if built.data.images is not self._images or kind_of(built) != self._kind:
            return False
        values = self._values_of(built.module)
        # A buffer may be nan until its value is known.
        return values.shape == self._values.shape and torch.allclose(
            self._values, values, rtol=LOSS_TOLERANCE, atol=0, equal_nan=True
        )

    @torch.no_grad()
    def _values_of(self, module: LightningModule) -> Tensor:
        """Return losses of a module with the weights of the first module, and what they change."""
        functional = Functional(module.to(self._device))
        steps = 1
        if changes_in_steps(module):
            steps = COMPARED_STEPS
        # A loss may change an untrained parameter in place.
        parameters = {name: tensor.clone() for name, tensor in self._parameters.items()}
        buffers = self._buffers
        losses = []
        with preserve_rng_state(seed=0):  # so that all modules draw the same dropout
            for _ in range(steps):
                loss, buffers = functional.call_and_update("loss", parameters, buffers, self._batch)
                losses.append(loss)
        values = [*losses, *buffers.values()]
        for name, tensor in parameters.items():
            if not equal_with_nan(tensor, self._parameters[name]):
                values.append(tensor)
        return torch.cat([value.double().flatten() for value in values])


def _double_copies(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return copies of tensors by name, floating-point ones in float64."""
    return {name: _to_double(tensor.detach().clone()) for name, tensor in tensors}


def _to_double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
