"""Which attempts train in one stack: attempts with equal keys whose modules are equal.

`batching_key` compares attempts before they are built, `StackFiller` compares their modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lit_dps.core.attempt import Attempt
from lit_dps.data import ImageData
from lit_dps.engines.eligible import Functional, optimizer_of, reason_of, tensors_of
from lit_dps.engines.engine import Training
from lit_dps.engines.network_run import NetworkRun, build_trial
from lit_dps.module import ImageClassifier
from lit_dps.optim import RULES, rule_of
from lit_dps.training.hidden_state import unchanged_attributes
from lit_dps.training.workload import Built

# Parameters of the learning rate and its schedule, which may differ between networks of a stack.
RATE_KEYS = frozenset({"model.learning_rate", "model.decay_steps", "model.end_factor"})

# Examples whose loss shows whether two modules differ in more than their weights.
COMPARED_EXAMPLES = 64
# Relative tolerance of that loss in float64. A penalty of weight 1e-6 changes it by 1e-5.
LOSS_TOLERANCE = 1e-9
# Reason of an attempt whose module differs from the first module of its stack.
DIFFERENT_MODULE = "its module differs from the stack in more than its weights"


class BatchingKey(NamedTuple):
    """What the attempts of a stack have in common. Attempts with equal keys may train together.

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
    trial = attempt.trial
    assert trial is not None
    network_keys = set(RATE_KEYS)
    for rule in RULES.values():
        network_keys.update(f"model.{name}" for name in rule.hyperparameters)
    axes = tuple(pair for pair in trial.cell.axes if not pair[0].startswith("pruning."))
    kind: list[tuple[str, bool | str]] = []
    numbers: list[tuple[str, float]] = []
    for key, value in sorted(trial.params.items()):
        if key in network_keys:
            continue
        if isinstance(value, float) and not key.startswith("local."):
            # Zero turns a feature off, as in `dropout: 0.0`, which decides on the loop.
            kind.append((key, value != 0))
            numbers.append((key, value))
        else:
            kind.append((key, repr(value)))
    return BatchingKey((trial.cell.batch_size, axes), tuple(kind), tuple(numbers))


class AttemptQueue:
    """The attempts in the order of the study, with a look ahead for equal keys.

    Args:
        next_attempt: Returns the next attempt of the study, or None at its end.
        max_waiting: Attempts that may wait while an attempt with another key is sought.
    """

    def __init__(self, next_attempt: Callable[[], Attempt | None], max_waiting: int):
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
        training: The settings of the study.

    Attributes:
        unstacked: Attempts to train one at a time afterwards. Their modules differ from the first
            one, or an error occurred in the stack. The attempt that caused it raises it again, and
            becomes a failed trial.
    """

    def __init__(self, first: Attempt, queue: AttemptQueue, training: Training):
        self.unstacked: list[Unstacked] = []
        self._pending = [first]
        self._key = batching_key(first)
        self._queue = queue
        self._training = training
        self._reference: _Reference | None = None

    def next_runs(self, count: int) -> list[NetworkRun]:
        """Begin the next attempts: `count` runs, or fewer if there are no more."""
        runs = []
        while len(runs) < count:
            run = self.next_run()
            if run is None:
                break
            runs.append(run)
        return runs

    def next_run(self) -> NetworkRun | None:
        """Begin the next attempt that fits into the stack, or resume it from its checkpoint.

        Returns:
            Its run; None if no such attempt remains.
        """
        while True:
            attempt = self._pending.pop() if self._pending else self._queue.next_with(self._key)
            if attempt is None:
                return None
            try:
                run = self._begin(attempt)
            except Exception as error:
                self.unstack_after_error(attempt, error)
                continue
            if run is not None:
                return run
            self.unstacked.append(Unstacked(attempt, DIFFERENT_MODULE))

    def unstack_after_error(self, attempt: Attempt, error: Exception) -> None:
        """Restart an attempt after an error in its stack, and train it one at a time afterwards."""
        attempt.restart()
        self.unstacked.append(Unstacked(attempt, f"an error in its stack: {reason_of(error)}"))

    def _begin(self, attempt: Attempt) -> NetworkRun | None:
        """Return the run of an attempt; None if its module differs from the first module."""
        built, device = build_trial(self._training, attempt.trial)
        if self._reference is None:
            self._reference = _Reference(built, device)
        elif not self._reference.equals(built):
            return None
        return NetworkRun.begin(attempt, built, self._training, device, stacked=True)


class _Reference:
    """The first module of a stack, with which the modules of the other attempts are compared.

    Args:
        built: The module and its data, set up.
        device: Where the modules are compared.
    """

    def __init__(self, built: Built, device: torch.device):
        assert isinstance(built.data, ImageData)
        x, y = built.data.on_device("train", device)
        self._batch = tree_map(_to_double, (x[:COMPARED_EXAMPLES], y[:COMPARED_EXAMPLES]))
        self._device = device
        self._module = built.module
        self._kind = _kind_of(built)

    @torch.no_grad()
    def equals(self, built: Built) -> bool:
        """Return True if a module equals the first module except for its weights."""
        if _kind_of(built) != self._kind:
            return False
        module = built.module.to(self._device)
        tensors = tree_map(_to_double, tensors_of(module))
        expected = Functional(self._module).call("loss", tensors, self._batch)
        loss = Functional(module).call("loss", tensors, self._batch)
        return torch.allclose(expected, loss, rtol=LOSS_TOLERANCE, atol=0)


def _kind_of(built: Built) -> tuple:
    """Return what the trials of a stack must have in common: rule, shapes and images."""
    module, data = built.module, built.data
    assert isinstance(module, ImageClassifier) and isinstance(data, ImageData)
    shapes = {}
    for name, tensor in tensors_of(module).items():
        shapes[name] = tensor.shape, tensor.requires_grad
    with unchanged_attributes(module):  # the module is trained afterwards
        optimizer, _ = optimizer_of(module.configure_optimizers())
    return rule_of(optimizer), shapes, id(data.images)


def _to_double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
