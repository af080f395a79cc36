"""Trains trials by an engine, as a study would: what the tests of both engines call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lit_dps.core.attempt import Attempt
from lit_dps.core.trial import LIGHTNING, Cell, Trial, TrialResult
from lit_dps.engines.trial_engine import TrialEngine
from lit_dps.storage.trial_queue import TrialQueue
from lit_dps.training import GoalErrorCallback
from lit_dps.training.workload import Workload
from tests.support.setups import training_of

ASKED = (
    "further",
    "limit",
    "pause",
    "train_past_goal",
    "metrics",
)  # of the runs, all else is of the engine


def engine(
    workload: Workload,
    goal: dict,
    lean: bool = True,
    size: int = 1,
    ahead: int | None = None,
    stacks_alone: bool = False,
    **common: Any,
) -> TrialEngine:
    """An engine that chooses the loop, or trains by Lightning's loop; `common` are further arguments of `TrialSettings`."""
    training = training_of(workload, goal, **common)
    name = "auto" if lean else LIGHTNING
    return TrialEngine(training, size, ahead, stacks_alone, name)


def runs(
    trials: Iterable[Trial],
    goal: dict,
    further: Iterable[float] = (),
    limit: Callable[[Cell], float] = lambda cell: math.inf,
    pause: Callable[[Cell], float] = lambda cell: math.inf,
    **of_run: Any,
) -> Callable[[], Attempt | None]:
    """Trials as an engine asks for them.

    Args:
        trials: The trials.
        goal: Arguments of `GoalErrorCallback`.
        further: Further values of the goal's metric.
        limit: The step that the trials of a cell have to reach.
        pause: The step at which they pause.
        of_run: Further arguments of `Attempt`.
    """
    stop = GoalErrorCallback(**goal).goal
    made = (
        Attempt(t, stop, tuple(further), lambda cell=t.cell: limit(cell), pause(t.cell), **of_run)
        for t in trials
    )
    return lambda: next(made, None)


def train(
    trials: Iterable[Trial],
    workload: Workload,
    goal: dict,
    *,
    raise_if_stopped: Callable[[], None] = lambda: None,
    **options,
) -> list[TrialResult]:
    """The results of trials; options of `runs` and `engine`."""
    asked = {key: options.pop(key) for key in ASKED if key in options}
    options |= (
        {"metrics": tuple(asked["metrics"])} if "metrics" in asked else {}
    )  # the engine's too
    return list(
        engine(workload, goal, **options).train(runs(trials, goal, **asked), raise_if_stopped)
    )


def train_one(trial: Trial, workload: Workload, goal: dict, **options) -> TrialResult:
    """The result of one trial."""
    (result,) = train([trial], workload, goal, **options)
    return result


def trials_of(store: TrialQueue) -> Iterator[Trial]:
    """The trials that a store hands out, one at a time."""
    return (run.trial for run in iter(store.claim_next, None))
