"""Which attempts may train in one stack, and the queue that finds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lit_dps.core.attempt import Attempt
from lit_dps.optim import RULES

# Parameters of the learning rate and its schedule, which each network of a stack has of its own.
RATE_KEYS = frozenset({"model.learning_rate", "model.decay_steps", "model.end_factor"})


class BatchingKey(NamedTuple):
    """What the attempts of a stack have in common. Attempts with equal keys may train together.

    Attributes:
        cell: The batch size and the values of all axes except those of pruning.
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

    Each network of a stack has its own weights, mask, learning rate and hyperparameters. All other
    arguments of the module and the data must be equal, for example those of a loss. Of a float only
    whether it is zero decides on the loop, because zero turns a feature off, as in `dropout: 0.0`.
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
            kind.append((key, value != 0))
            numbers.append((key, value))
        else:
            kind.append((key, repr(value)))
    return BatchingKey((trial.cell.batch_size, axes), tuple(kind), tuple(numbers))


class AttemptQueue:
    """Attempts in the order in which the study gives them, with a look ahead for equal keys.

    Args:
        next_attempt: Returns the next attempt of the study, or None if there is none at present.
        max_waiting: Attempts that may wait while an attempt with another key is sought.
    """

    def __init__(self, next_attempt: Callable[[], Attempt | None], max_waiting: int):
        self._next_attempt = next_attempt
        self._max_waiting = max_waiting
        self._waiting: list[Attempt] = []

    def next(self) -> Attempt | None:
        """Return the next attempt, or None if there is none at present."""
        if self._waiting:
            return self._waiting.pop(0)
        return self._next_attempt()

    def next_with(self, key: BatchingKey) -> Attempt | None:
        """Return the next attempt with this key, unless one of another cell comes first."""
        index = self._index(key)
        return None if index is None else self._waiting.pop(index)

    def has(self, key: BatchingKey) -> bool:
        """Return True if `next_with` has an attempt."""
        return self._index(key) is not None

    def _index(self, key: BatchingKey) -> int | None:
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
