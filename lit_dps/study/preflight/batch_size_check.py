"""Checks that the metrics of a network do not depend on the batch size.

Validation batches may have the batch size of the grid. Then a metric such as the mean over batches
of a root is a different goal at each batch size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dps.core.environment import ROUNDING_OF_HALF
from lit_dps.core.errors import ConfigError
from lit_dps.core.trial import Trial
from lit_dps.engines.trial_settings import TrialSettings
from lit_dps.study.preflight.short_trial import ShortTrial, goal_of, perturb
from lit_dps.study.preflight.varied_trials import with_cell
from lit_dps.study.probe_run import EndProbe, probe_fit
from lit_dps.study.setup import StudySetup
from lit_dps.training.deterministic import full_float32

# Largest relative difference between two sums of the same numbers in another order.
ROUNDING = 1e-4
ABSOLUTE_ROUNDING = 1e-7
# A difference is random if it is at most this multiple of the range of a metric over 6 validations
# of one network. Normal values have a larger difference in 0.3 % of comparisons.
RANDOM_RANGES = 3


def compare_metrics(
    settings: TrialSettings, trial: Trial, short: ShortTrial, setup: StudySetup
) -> list[str]:
    """Compare the metrics of one network at both ends of the grid, and return notes.

    Two networks are validated at each end: the untrained network, and the same with noise on its
    weights. Without noise, an untrained network may give the same output for every example.

    The networks are validated in full precision, because half precision hides differences below 1
    %. A module that fails in full precision is validated in the precision of the trainer.

    Args:
        settings: The settings of the study.
        trial: A dense trial at the smallest batch size of the grid.
        short: A short trial there, whose validations show how random a metric is.
        setup: The study.

    Returns:
        Notes of one line each.

    Raises:
        ConfigError: if the goal's metric differs by more than rounding, and by more than
            `RANDOM_RANGES` times its range over validations of one network.
    """
    # A validation that stops early has no value of the metric.
    user_settings = replace(settings, goal=replace(settings.goal, early_reject=False))
    settings = _in_full_precision(user_settings)
    rounding = ROUNDING
    smallest = untrained_metrics(settings, trial)
    if not smallest.networks and settings is not user_settings:
        settings = user_settings
        rounding = _rounding(setup)
        smallest = untrained_metrics(settings, trial)
    if not smallest.networks:
        name = settings.goal.monitored
        return [
            f"whether {name} depends on the batch size is not known: validation needs a trained "
            "network"
        ]
    sizes = setup.study.batch_sizes
    ragged = _first_ragged_size(sizes, smallest.examples, settings.workload.parts_of(trial.cell))
    others = [max(sizes)]
    if ragged is not None:
        others.append(ragged)
    ranges = _random_ranges(short, ROUNDING)
    notes: list[str] = []
    for batch_size in others:
        other = with_cell(trial, batch_size=batch_size)
        metrics = untrained_metrics(settings, other)
        differences = _differences(smallest.networks, metrics.networks, rounding, ranges)
        for metric, values in differences.items():
            notes.append(_note_or_refusal(settings, (trial, other), metric, values))
    return list(dict.fromkeys(notes))


def _note_or_refusal(
    settings: TrialSettings,
    trials: tuple[Trial, Trial],
    metric: str,
    values: tuple[float, float],
) -> str:
    """Return the note on a metric that differs between two trials.

    Raises:
        ConfigError: if it is the metric of the goal.
    """
    shown = " and ".join(
        f"{value:.4g} at B = {trial.cell.batch_size}"
        for trial, value in zip(trials, values, strict=True)
    )
    if metric == settings.goal.monitored:
        raise ConfigError(
            settings.goal.metric_key,
            metric,
            "a metric that does not depend on the validation batch size. For the same network "
            f"it is {shown}. Give validation a fixed batch size",
        )
    return f"{metric} depends on the validation batch size: for the same network it is {shown}"


def repeated_metrics(short: ShortTrial, setup: StudySetup) -> list[str]:
    """Return a note for each metric that differs between two validations of one network.

    Such a metric is random, or it keeps a state from one validation to the next.
    """
    notes = []
    for metric, (one, two) in _repeated_differences(short, _rounding(setup)).items():
        notes.append(
            f"{metric} of one network is {one:.4g} and then {two:.4g}: it is random, or keeps "
            "a state from one validation to the next, and so the steps to the goal depend on it"
        )
    return notes


def _repeated_differences(short: ShortTrial, rounding: float) -> dict[str, tuple[float, float]]:
    """Return two values of each metric that differs between validations of one network."""
    repeated = short.epochs.repeated
    others = repeated[1:]
    return _differences(repeated[:1] * len(others), others, rounding, {})


def _random_ranges(short: ShortTrial, rounding: float) -> dict[str, float]:
    """Return the range over validations of one network of each metric that differs there."""
    ranges = {}
    for metric in _repeated_differences(short, rounding):
        values = [metrics[metric] for metrics in short.epochs.repeated if metric in metrics]
        ranges[metric] = max(values) - min(values)
    return ranges


def _differences(
    first: Sequence[dict[str, float]],
    second: Sequence[dict[str, float]],
    rounding: float,
    ranges: Mapping[str, float],
) -> dict[str, tuple[float, float]]:
    """Return both values of the metrics that differ between networks.

    If a metric differs for several networks, the values of the largest relative difference are
    returned.

    Args:
        first, second: The metrics of each network, by name.
        rounding: The relative difference that rounding explains.
        ranges: The range of each random metric. `RANDOM_RANGES` times as much is random.
    """
    differences: dict[str, tuple[float, float]] = {}
    for one, two in zip(first, second, strict=False):
        for metric in one.keys() & two.keys():
            values = (one[metric], two[metric])
            if _is_equal(*values, rounding):
                continue
            if abs(values[0] - values[1]) <= RANDOM_RANGES * ranges.get(metric, 0.0):
                continue
            if metric not in differences or _gap(values) > _gap(differences[metric]):
                differences[metric] = values
    return differences


def _gap(values: tuple[float, float]) -> float:
    """Return the relative difference of two values; infinity if one of them is not finite."""
    if not all(map(math.isfinite, values)):
        return math.inf
    return abs(values[0] - values[1]) / max(map(abs, values))


def _first_ragged_size(
    batch_sizes: Sequence[int], examples: Mapping[int, int], accumulated: int
) -> int | None:
    """Return the smallest batch size with a short last validation batch.

    Returns:
        None if no size has one, or if the smallest or the largest batch size has a short batch.
    """

    def is_ragged(batch_size: int) -> bool:
        return any(count % (batch_size // accumulated) for count in examples.values())

    ascending = sorted(batch_sizes)
    if is_ragged(ascending[0]) or is_ragged(ascending[-1]):
        return None
    return next(filter(is_ragged, ascending), None)


def _is_equal(one: float, two: float, rounding: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(two)):
        return math.isfinite(one) == math.isfinite(two)
    return math.isclose(one, two, rel_tol=rounding, abs_tol=ABSOLUTE_ROUNDING)


def _rounding(setup: StudySetup) -> float:
    """Return the largest relative difference that the precision of the trainer explains."""
    return ROUNDING if has_full_precision(setup.workload.trainer) else ROUNDING_OF_HALF


def has_full_precision(trainer: Mapping[str, Any]) -> bool:
    """Return True if a trainer computes with at least 24 bits."""
    return str(trainer.get("precision") or "32").startswith(("32", "64"))


def _in_full_precision(settings: TrialSettings) -> TrialSettings:
    """Return `settings`, or a copy whose trainer has 32 bits if it has less."""
    trainer = settings.workload.trainer
    if has_full_precision(trainer):
        return settings
    workload = replace(settings.workload, trainer={**trainer, "precision": "32-true"})
    return replace(settings, workload=workload)


def untrained_metrics(settings: TrialSettings, trial: Trial) -> UntrainedMetrics:
    """Validate the untrained network of a trial, and the same network with noise on its weights.

    Args:
        settings: The settings of the study. Its validations must not stop early.
        trial: The trial; it is not trained.
    """
    metrics = UntrainedMetrics()
    with full_float32(), suppress(Exception):  # some modules cannot validate without training
        probe_fit(settings, trial, metrics)
    return metrics


class UntrainedMetrics(Callback):
    """Validates a network before its first step, without and with noise; then ends the fit.

    Attributes:
        networks: Metrics by name, of the untrained network and of the same with noise on its
            weights. The list is empty or shorter if validation fails.
        examples: Examples of a validation, by the number of the data loader.
    """

    def __init__(self):
        self.networks: list[dict[str, float]] = []
        self.examples: dict[int, int] = {}

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        goal = goal_of(trainer)
        self.networks.append(goal.validate_now(trainer))
        self.examples = goal.validated.first or {}
        perturb(pl_module)
        self.networks.append(goal.validate_now(trainer))
        raise EndProbe
