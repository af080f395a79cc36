"""Checks that the metrics of a network do not depend on the batch size.

Validation batches may have the batch size of the grid. Then a metric such as the mean over batches
of a root is a different goal at each batch size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from statistics import fmean
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dps.core.errors import ConfigError
from lit_dps.core.trial import Trial
from lit_dps.engines.engine import Training
from lit_dps.study.preflight.short_trial import Short, goal_of, perturb
from lit_dps.study.probe_run import EndProbe, probe_fit
from lit_dps.study.setup import StudySetup
from lit_dps.training.deterministic import full_float32

# Largest relative difference between two sums of the same numbers in another order.
ROUNDING = 1e-4
ROUNDING_OF_HALF = 1e-2  # with less than 24 bits
REPEATS = 3  # validations of one network that measure how random its metrics are


def compare_metrics(training: Training, trial: Trial, setup: StudySetup) -> list[str]:
    """Compare the metrics of one network at both ends of the grid, and return notes.

    Two networks are validated at each end: the untrained network, and the same with noise on its
    weights. Without noise, an untrained network may give the same output for every example.

    The networks are validated in full precision, because half precision hides differences below 1
    %. A module that fails in full precision is validated in its own precision.

    Args:
        training: What the trials have in common.
        trial: A dense trial at the smallest batch size of the grid.
        setup: The study.

    Returns:
        Notes of one line each.

    Raises:
        ConfigError: if the goal's metric differs by more than rounding.
    """
    # A validation that stops early has no value of the metric.
    training = replace(training, goal=replace(training.goal, early_reject=False))
    own_precision = training
    training = _in_full_precision(training)
    rounding = ROUNDING
    smallest, examples = look_at(training, trial)
    if not smallest and training is not own_precision:
        training = own_precision
        rounding = _rounding(setup)
        smallest, examples = look_at(training, trial)
    sizes = setup.study.batch_sizes
    name = training.goal.monitored
    notes: list[str] = []
    if not smallest:
        return [
            f"whether {name} depends on the batch size is not known: validation needs a trained "
            "network"
        ]
    for batch_size in [max(sizes), *_ragged(sizes, examples, training.workload.accumulated)]:
        other = replace(trial, cell=replace(trial.cell, batch_size=batch_size))
        metrics, _ = look_at(training, other)
        for metric, (network, one, two) in _differences(smallest, metrics, rounding).items():
            if _is_random(training, trial, other, metric, network):
                continue  # `repeated_metrics` notes it
            shown = f"{one:.4g} at B = {trial.cell.batch_size} and {two:.4g} at B = {batch_size}"
            if metric != name:
                notes.append(
                    f"{metric} depends on the validation batch size: of the same network it is "
                    f"{shown}"
                )
                continue
            what = f"of the same network it is {shown}: give validation a fixed batch size"
            raise ConfigError(
                training.goal.metric_key,
                name,
                f"a metric that does not depend on the validation batch size; {what}",
            )
    return list(dict.fromkeys(notes))


def repeated_metrics(short: Short, setup: StudySetup) -> list[str]:
    """Return a note for each metric that differs between two validations of one network.

    Such a metric is random, or it keeps a state from one validation to the next.
    """
    notes = []
    first, second = short.repeated or ({}, {})
    for metric, one in first.items():
        two = second.get(metric, one)
        if not _is_equal(one, two, _rounding(setup)):
            notes.append(
                f"{metric} of one network is {one:.4g} and then {two:.4g}: it is random, or keeps "
                "a state from one "
                "validation to the next, and so the steps to the goal depend on it"
            )
    return notes


def _differences(
    ones: list[dict[str, float]], others: list[dict[str, float]], rounding: float
) -> dict[str, tuple[int, float, float]]:
    """Return the metrics that differ by more than rounding, each with the network's number and both
    values.

    If a metric differs for both networks, the network with the larger relative difference is
    returned.
    """
    differences: dict[str, tuple[int, float, float]] = {}
    for network, (one, other) in enumerate(zip(ones, others, strict=False)):
        for metric in one.keys() & other.keys():
            pair = one[metric], other[metric]
            if _is_equal(*pair, rounding):
                continue
            if metric not in differences or _gap(pair) > _gap(differences[metric][1:]):
                differences[metric] = network, *pair
    return differences


def _gap(pair: tuple[float, float]) -> float:
    """Return the relative difference of two values; infinity if one of them is not finite."""
    if not all(map(math.isfinite, pair)):
        return math.inf
    return abs(pair[0] - pair[1]) / max(map(abs, pair))


def _ragged(batch_sizes: list[int], examples: dict[int, int], accumulated: int) -> list[int]:
    """Return the smallest batch size with a short last validation batch.

    The list is empty if there is none, or if the smallest or the largest batch size is one.
    """

    def is_ragged(batch_size: int) -> bool:
        return any(n % (batch_size // accumulated) for n in examples.values())

    if is_ragged(min(batch_sizes)) or is_ragged(max(batch_sizes)):
        return []
    return [batch_size for batch_size in sorted(batch_sizes) if is_ragged(batch_size)][:1]


def _is_equal(one: float, two: float, rounding: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(two)):
        return math.isfinite(one) == math.isfinite(two)
    return math.isclose(one, two, rel_tol=rounding, abs_tol=1e-7)


def _rounding(setup: StudySetup) -> float:
    """Return the largest relative difference that the precision of the trainer explains."""
    return ROUNDING if _is_full(setup.workload.trainer) else ROUNDING_OF_HALF


def _is_full(trainer: Mapping[str, Any]) -> bool:
    return str(trainer.get("precision") or "32").startswith(("32", "64"))


def _in_full_precision(training: Training) -> Training:
    """Return a copy of `training` whose trainer has at least 32 bits."""
    trainer = training.workload.trainer
    if _is_full(trainer):
        return training
    workload = replace(training.workload, trainer={**trainer, "precision": "32-true"})
    return replace(training, workload=workload)


def _is_random(training: Training, one: Trial, two: Trial, metric: str, network: int) -> bool:
    """Return whether a metric is random, and its range explains the difference of two trials.

    The range is taken over `REPEATS` seeds, for the network with this number.
    """
    values = []
    for trial in (one, two):
        looks = [look_at(training, trial, seed)[0] for seed in range(REPEATS)]
        values.append([look[network][metric] for look in looks if len(look) > network])
    if not all(values):
        return False
    ranges = [max(samples) - min(samples) for samples in values]
    gap = abs(fmean(values[0]) - fmean(values[1]))
    return sum(ranges) > 0 and gap <= 3 * sum(ranges)


def look_at(
    training: Training, trial: Trial, seed: int | None = None
) -> tuple[list[dict[str, float]], dict[int, int]]:
    """Validate the untrained network of a trial, and the same network with noise on its weights.

    Args:
        training: What the trials have in common.
        trial: The trial; it is not trained.
        seed: Seed of the random numbers in validation; None takes the seed of the trial.

    Returns:
        The metrics of both networks by name, and the examples of a validation by data loader. Both
        are empty if validation fails.
    """
    look = _Look()
    with full_float32(), suppress(Exception):
        probe_fit(training, trial, look, seed)
    return look.metrics, look.examples


class _Look(Callback):
    """Validates a network before its first step, without and with noise; then ends the fit."""

    def __init__(self):
        self.metrics: list[dict[str, float]] = []
        self.examples: dict[int, int] = {}

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        goal = goal_of(trainer)
        self.metrics.append(goal.validate_now(trainer))
        self.examples = goal.validated.first or {}
        perturb(pl_module)
        self.metrics.append(goal.validate_now(trainer))
        raise EndProbe
