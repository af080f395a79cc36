"""Which runs are alike, so that one loop trains them, and side by side; and the queue that finds
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lit_dps.core.attempt import Attempt
from lit_dps.optim import RULES

OF_THE_RATE = {"model.learning_rate", "model.decay_steps", "model.end_factor"}


class Alike(NamedTuple):
    """What runs in lockstep have in common: of their cell all but how it is pruned, and what their
    networks are."""

    cells: tuple
    kind: tuple
    numbers: tuple


def alike_of(run: Attempt) -> Alike:
    """What a run has in common with those that can be trained beside it; `cells` and `kind` say by
    which loop.

    A network in lockstep has its own weights, mask, rate and update. All else that the module and
    the data are given is one for all of them, be it of a loss, where its effect may be small. Of a
    number only whether it is zero decides on the loop: that turns things off, as in `dropout: 0.0`.
    """
    cell, own = (
        run.trial.cell,
        {f"model.{name}" for rule in RULES.values() for name in rule.hyperparameters},
    )
    cells = (
        cell.batch_size,
        tuple(pair for pair in cell.axes if not pair[0].startswith("pruning.")),
    )
    kind, numbers = [], []
    for key, value in sorted(run.trial.params.items()):
        if key not in own | OF_THE_RATE:
            counts = isinstance(value, float) and not key.startswith("local.")
            kind.append((key, value != 0 if counts else repr(value)))
            numbers += [(key, value)] if counts else []
    return Alike(cells, tuple(kind), tuple(numbers))


class Queue:
    """Runs that are asked for one at a time, when there is room; at most so many wait for others
    than those alike."""

    def __init__(self, next_run: Callable[[], Attempt | None], ahead: int):
        self._next_run, self._ahead = next_run, ahead
        self._waiting: list[Attempt] = []

    def next(self) -> Attempt | None:
        return self._waiting.pop(0) if self._waiting else self._next_run()

    def next_of(self, alike: Alike) -> Attempt | None:
        """The next run that is like this, if it is one of the next ones of the cells that are
        trained together."""
        return None if (i := self._place(alike)) is None else self._waiting.pop(i)

    def has(self, alike: Alike) -> bool:
        """Whether `next_of` has one."""
        return self._place(alike) is not None

    def _place(self, alike: Alike) -> int | None:
        for i in range(self._ahead):
            if i == len(self._waiting):
                if (run := self._next_run()) is None:
                    return None
                self._waiting.append(run)
            found = alike_of(self._waiting[i])
            if found == alike or found.cells != alike.cells:
                return i if found == alike else None
        return None
