"""Samplers: the metaparameters of each point of a study's cells.

`SobolSampler` is the default. `SearchSampler` uses one of Optuna's adaptive samplers. With
`BestOfSampler`, all trials of a cell run the best point of another study. `GivenSampler` has the
points of a caller that decides them itself.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial
from scipy.stats import qmc

from lit_dps.core.config import SAMPLERS, StudyConfig
from lit_dps.core.errors import ConfigError
from lit_dps.core.goal import Goal
from lit_dps.core.racing import best_trial
from lit_dps.core.registry import named
from lit_dps.core.search_space import Box, Choices, ExpandedSpace, Space, is_inside
from lit_dps.core.trial import Cell, Status, Value, derive_seed
from lit_dps.core.unit import STEPS
from lit_dps.storage import columns, schema
from lit_dps.storage.read import read_study
from lit_dps.storage.schema import POINT_ATTR, RESULT_ATTR

UNIT_INTERVAL = FloatDistribution(0.0, 1.0)
# Costs have a logarithm. The clock of a run may show 0 seconds.
SMALLEST_COST = 1e-6
# Added to the logarithm of the cost of a trial that diverged: it is worse than one that only missed
# the goal.
DIVERGENCE_PENALTY = 2.0

SamplerFactory = Callable[[int, int], BaseSampler]  # (seed, number of first points) -> sampler


def make_sampler(
    study: StudyConfig,
    goal: Goal,
    spaces: Sequence[ExpandedSpace] = (),
    points: Sequence[Mapping[str, Value]] = (),
    trusts_best_of: bool = False,
) -> PointSampler:
    """Return the sampler of a study's points.

    Args:
        study: The configuration of the study.
        goal: When trials stop.
        spaces: The expansions of the search space.
        points: The metaparameters of each point; empty lets `study.sampler` draw them.
        trusts_best_of: Whether modules that the study in `study.best_of` names may be imported.

    Raises:
        ConfigError: if study.sampler names no sampler.
    """
    if points:
        return GivenSampler(study.space, points)
    if study.best_of is not None:
        return BestOfSampler(study.best_of, study.space, trusts_best_of)
    if study.sampler == "sobol":
        return SobolSampler(study.space, study.seed, study.scramble, spaces)
    return SearchSampler(study, goal, sampler_factory(study.sampler))


def _make_tpe(seed: int, first: int) -> BaseSampler:
    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=first, multivariate=True)


def _make_gp(seed: int, first: int) -> BaseSampler:
    return optuna.samplers.GPSampler(seed=seed, n_startup_trials=first)


_FACTORIES: dict[str, SamplerFactory] = {"tpe": _make_tpe, "gp": _make_gp}


def sampler_factory(name: str) -> SamplerFactory:
    """Return the factory of an adaptive sampler by its name or class path.

    Raises:
        ConfigError: if there is no such sampler, or if it takes no seed.
    """

    def is_sampler(value: object) -> bool:
        return isinstance(value, type) and issubclass(value, BaseSampler)

    choices = {**dict.fromkeys(SAMPLERS), **_FACTORIES}
    sampler = named("study.sampler", name, choices, "sampler of Optuna", is_sampler)
    if name in _FACTORIES:
        return sampler
    try:
        sampler(seed=0)
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError("study.sampler", name, f"a sampler that takes a seed: {error}") from error
    return lambda seed, first: sampler(seed=seed)


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """Return the search space as Optuna distributions.

    Optuna has no reverse-log distribution. It stores the value; the sampler scales it.
    """
    return {key: _distribution(box) for key, box in sorted(space.items())}


def _distribution(box: Box) -> BaseDistribution:
    if isinstance(box, Choices):
        return CategoricalDistribution(box.choices)
    if box.integer:
        return IntDistribution(int(box.low), int(box.high))
    return FloatDistribution(box.low, box.high, log=box.scale == "log")


class PointSampler(BaseSampler):
    """A sampler that draws the metaparameters of the point that a trial holds.

    The point is the trial's user attribute `POINT_ATTR`. A retried trial has the same point.

    Args:
        space: The search space.
    """

    def __init__(self, space: Space):
        self.space = dict(space)

    def read_other_studies(self, storage: BaseStorage) -> None:
        """Read what the points need of other studies, before the storage is locked."""

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return distributions(self.space)

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        raise KeyError(f"{param_name} is not in the declared search space")


# ---- Sobol points ----


def sobol_point(space: Space, seed: int, index: int, scramble: bool = True) -> dict[str, Value]:
    """Return point `index` of the Sobol sequence over the space; it depends on the arguments only.

    Dimensions are in the order of the sorted keys. Optuna's QMCSampler draws the same sequence. It
    uses the argument `seed`; `rng` would give another sequence.
    """
    keys = sorted(space)
    with warnings.catch_warnings():
        # A Sobol sequence is balanced after 2^m points only. Any prefix is used here.
        warnings.simplefilter("ignore", UserWarning)
        # scipy's stubs know `rng` only.
        seeded = {"scramble": scramble, "seed": seed}
        engine = qmc.Sobol(len(keys), **seeded)
        if index:
            engine.fast_forward(index)
        coordinates = engine.random(1)[0]
    return {key: space[key].at(float(u)) for key, u in zip(keys, coordinates, strict=True)}


def boxed_point(
    space: Space, history: Sequence[ExpandedSpace], seed: int, index: int, scramble: bool = True
) -> dict[str, Value]:
    """Return point `index` of a study whose space was expanded; it depends on the arguments only.

    The first points are the Sobol sequence over the first space. An expansion continues with the
    sequence over the new space: first its points outside of the former space, from
    `ExpandedSpace.first` to `ExpandedSpace.end`, then all points that follow in this sequence.
    """
    expansion: ExpandedSpace | None = None
    former_space = space
    for each in history:
        if index < each.first:
            break
        if expansion is not None:
            former_space = expansion.space
        expansion = each
    if expansion is None:
        return sobol_point(space, seed, index, scramble)
    last_outside = min(index, expansion.end - 1) - expansion.first
    position = _position_outside(former_space, expansion.space, seed, last_outside, scramble)
    beyond = max(0, index - expansion.end + 1)
    return sobol_point(expansion.space, seed, position + beyond, scramble)


def _position_outside(former: Space, space: Space, seed: int, number: int, scramble: bool) -> int:
    """Return the position in the sequence of the `number`-th point outside of the former space."""
    position = -1
    for _ in range(number + 1):
        position += 1
        while is_inside(former, sobol_point(space, seed, position, scramble)):
            position += 1
    return position


class SobolSampler(PointSampler):
    """Sobol points: a trial gets the point of the Sobol sequence that its point index names.

    Optuna's QMCSampler draws the first trial at random and counts points in the storage without a
    lock, so that workers repeat and skip some.

    Args:
        space: The search space at the study's start.
        seed: Seed of the sequence.
        scramble: Whether the sequence is scrambled.
        history: The expansions of the space.
    """

    def __init__(
        self, space: Space, seed: int, scramble: bool = True, history: Sequence[ExpandedSpace] = ()
    ):
        last_space = history[-1].space if history else space
        super().__init__(last_space)
        self._first_space = dict(space)
        self._history = tuple(history)
        self._seed = seed
        self._scramble = scramble

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        point = trial.user_attrs[POINT_ATTR]
        return boxed_point(self._first_space, self._history, self._seed, point, self._scramble)


# ---- Adaptive searches ----


class SearchSampler(PointSampler):
    """One of Optuna's samplers, on the unit cube, so that the scales of the space are respected.

    The first points of a cell are Sobol points. Each later point is drawn from the results of its
    cell so far, by a new sampler with a seed of the point. No state is kept between points, so the
    search of one worker is reproducible. With several workers it is not, because it depends on
    which results are stored first. After an interruption in the middle of a trial it is not either:
    this trial runs again after the waiting ones, so that later points differ.

    Points that other workers run count as bad, so that no worker draws them again. A point that
    runs again keeps its metaparameters.

    The objective is the logarithm of the cost to result, in `goal.unit`. For a trial that missed
    the goal it is the logarithm of twice the largest cost, plus the relative distance from the
    goal. The largest cost is max_steps, or in another unit the largest one of any trial so far.

    Args:
        study: The configuration of the study.
        goal: When trials stop.
        make: Makes Optuna's sampler.
    """

    def __init__(self, study: StudyConfig, goal: Goal, make: SamplerFactory):
        super().__init__(study.space)
        self._seed, self._scramble = study.seed, study.scramble
        self._goal, self._make = goal, make
        self.first = 2 * (len(self.space) + 1)  # number of Sobol points

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        point = trial.user_attrs[POINT_ATTR]
        others = []
        for other in study.get_trials(deepcopy=False):
            if other.number != trial.number and other.params:
                others.append(other)
        attempts = [other for other in others if other.user_attrs.get(POINT_ATTR) == point]
        if attempts and self._has_all_params(attempts[-1]):
            return dict(attempts[-1].params)
        if point < self.first:
            return sobol_point(self.space, self._seed, point, self._scramble)
        return self._draw(point, others)

    def _has_all_params(self, trial: FrozenTrial) -> bool:
        return trial.params.keys() == self.space.keys()

    def _draw(self, point: int, others: Sequence[FrozenTrial]) -> dict[str, Value]:
        """Draw a point from the other trials of its cell by Optuna's sampler."""
        largest_cost = self._largest_cost(others)
        # Of several attempts at a point, the last one that ended counts.
        attempts: dict[int, tuple[FrozenTrial, float | None]] = {}
        for trial in others:
            objective = self.objective(trial, largest_cost)
            is_usable = objective is not None or trial.state is TrialState.RUNNING
            if self._has_all_params(trial) and is_usable:
                attempts[trial.user_attrs[POINT_ATTR]] = trial, objective
        objectives = [value for _, value in attempts.values() if value is not None]
        worst = max(objectives, default=0.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            sampler = self._make(derive_seed(self._seed, "search", point), self.first)
            memory = optuna.create_study(sampler=sampler)
            for key in sorted(attempts):
                trial, objective = attempts[key]
                if objective is None:
                    objective = worst
                memory.add_trial(self._unit_trial(trial, objective))
            drawn = memory.ask(dict.fromkeys(sorted(self.space), UNIT_INTERVAL)).params
        params = {}
        for name, box in self.space.items():
            # Boxes map [0, 1) to values.
            params[name] = box.at(min(drawn[name], math.nextafter(1.0, 0.0)))
        return params

    def _unit_trial(self, trial: FrozenTrial, objective: float) -> FrozenTrial:
        """Return a trial with its metaparameters mapped to the unit cube."""
        unit = {}
        for name, box in self.space.items():
            unit[name] = min(max(box.unit(trial.params[name]), 0.0), 1.0)
        spans: dict[str, BaseDistribution] = dict.fromkeys(unit, UNIT_INTERVAL)
        return create_trial(params=unit, distributions=spans, value=objective)

    def _largest_cost(self, trials: Sequence[FrozenTrial]) -> float:
        """Return the largest cost that a trial of the cell may have, as far as it is known."""
        unit = self._goal.cost_unit
        if unit is STEPS:
            return self._goal.max_steps
        largest = SMALLEST_COST
        for trial in trials:
            result = trial.user_attrs.get(RESULT_ATTR)
            if result is not None:
                largest = max(largest, columns.last_value(result["curve"], unit.column))
        return largest

    def objective(self, trial: FrozenTrial, largest_cost: float) -> float | None:
        """Return what is minimized; None for trials that have not ended, or that have failed.

        Args:
            trial: A trial of the cell.
            largest_cost: A trial that missed the goal counts as twice this cost.
        """
        result: Mapping[str, Any] | None = trial.user_attrs.get(RESULT_ATTR)
        if result is None or result["status"] == Status.FAILED:
            return None
        cost = schema.stored_cost(result)
        if cost is not None:
            return math.log(max(cost, SMALLEST_COST))
        missed = math.log(2 * largest_cost)
        # A validation can lack a finite value without divergence, so the last finite value counts.
        metric = columns.decode_columns(result["curve"]).get(self._goal.metric, [])
        finite = [value for value in metric if math.isfinite(value)]
        if result["status"] == Status.INFEASIBLE or not finite:
            return missed + DIVERGENCE_PENALTY
        distance = abs(finite[-1] - self._goal.value) / (abs(self._goal.value) or 1.0)
        return missed + distance / (1 + distance)


# ---- Best points of another study ----


class BestOfSampler(PointSampler):
    """All trials of a cell run the point of K* of the same cell of another study in the storage.

    The first trial of a cell decides: later trials get its point, even if the other study finds a
    better one.

    Args:
        name: Name of the other study.
        space: The search space.
        trust: Whether modules that the other study names may be imported.
    """

    def __init__(self, name: str, space: Space, trust: bool = False):
        super().__init__(space)
        self.name = name
        self._trust = trust
        self._best_params: dict[Cell, dict[str, Value]] = {}

    def read_other_studies(self, storage: BaseStorage) -> None:
        """Read the best point of each cell of the other study."""
        other = read_study(storage, self.name, self._trust)
        for cell, results in other.results.items():
            best = best_trial(results, other.statistic)
            if best is not None:
                self._best_params[cell] = dict(best.trial.params)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        for earlier in study.get_trials(deepcopy=False):
            if earlier.params.keys() == self.space.keys():
                return dict(earlier.params)
        attrs = study.user_attrs
        axes = tuple(sorted(attrs[schema.AXES].items()))
        cell = Cell(attrs[schema.BATCH_SIZE], attrs[schema.SPARSITY], axes)
        # The check before the start requires a K* in each cell.
        return dict(self._best_params[cell])


# ---- Given points ----


class GivenSampler(PointSampler):
    """Each point has the metaparameters that the caller gives it.

    A point that was tried before keeps the metaparameters that are stored.

    Args:
        space: The search space, which contains all points.
        points: The metaparameters of each point.
    """

    def __init__(self, space: Space, points: Sequence[Mapping[str, Value]]):
        super().__init__(space)
        self._points = points

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        point = trial.user_attrs[POINT_ATTR]
        for earlier in study.get_trials(deepcopy=False):
            is_same_point = earlier.user_attrs[POINT_ATTR] == point
            if is_same_point and earlier.params.keys() == self.space.keys():
                return dict(earlier.params)
        return dict(self._points[point])
