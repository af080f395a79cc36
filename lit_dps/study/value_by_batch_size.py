"""Whether a metric of one network has one value at both ends of the grid of batch sizes.

Validation batches may have the batch size of the grid. A root of each batch, say, is another goal at each batch size
then.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dps.engines.engine import Training
from lit_dps.engines.trainer import TrialFit
from lit_dps.errors import ConfigError
from lit_dps.runs import Run
from lit_dps.study.setup import StudySetup
from lit_dps.training import GoalErrorCallback
from lit_dps.training.generators import isolated
from lit_dps.trial import Trial

PERTURBATION = 0.1  # standard deviation of the noise on weights that all are zero
# Relative difference between two sums of the same numbers in another order, at most.
ROUNDING = 1e-4
ROUNDING_OF_HALF = 1e-2  # of fewer than 24 bits, and on a GPU, which may take TF32
REPEATS = 3  # checks of one network that tell how random validation is


def compare_metrics(training: Training, trial: Trial, setup: StudySetup) -> list[str]:
    """Compares the metrics of one network at both ends of the grid, and returns notes, a line each.

    Two networks are validated at each end, without training: the untrained one, and one with noise on its weights,
    since an untrained one may answer the same to every example.

    Args:
        training: What the trials have in common.
        trial: A dense one at the smallest batch size of the grid.
        setup: The study.

    Raises:
        ConfigError: if the goal's metric differs by more than rounding.
    """
    goal = GoalErrorCallback(**training.goal)
    smallest, examples = look_at(training, trial)
    sizes = setup.study.batch_sizes
    name = goal.monitor
    notes: list[str] = []
    if not smallest:
        return [f"whether {name} depends on the batch size is not known: validation needs a trained network"]
    for batch_size in [max(sizes), *_ragged(sizes, examples, training.workload.accumulated)]:
        other = replace(trial, cell=replace(trial.cell, batch_size=batch_size))
        found, _ = look_at(training, other)
        for metric, (one, two) in _differences(smallest, found, setup).items():
            if (spread := _spread(training, trial, other, metric)) is not None:
                notes.append(f"{metric} of one network differs from check to check, by {spread:.2g}: it is random")
                continue
            shown = f"{one:.4g} at B = {trial.cell.batch_size} and {two:.4g} at B = {batch_size}"
            if metric != name:
                notes.append(f"{metric} depends on the validation batch size: of the same network it is {shown}")
                continue
            key = "goal.monitor" if training.goal.get("metric") is None else "goal.metric"
            what = f"of the same network it is {shown}: give validation a batch size of its own"
            raise ConfigError(key, name, f"a metric that does not depend on the validation batch size; {what}")
    return list(dict.fromkeys(notes))


def _differences(
    ones: list[dict[str, float]], others: list[dict[str, float]], setup: StudySetup
) -> dict[str, tuple[float, float]]:
    """Return the metrics that differ by more than rounding, with both values of the network that shows most of it."""
    found: dict[str, tuple[float, float]] = {}
    for one, other in zip(ones, others, strict=False):
        for metric in one.keys() & other.keys():
            pair = one[metric], other[metric]
            if not _is_equal(*pair, setup) and (metric not in found or _gap(pair) > _gap(found[metric])):
                found[metric] = pair
    return found


def _gap(pair: tuple[float, float]) -> float:
    """Return the relative difference of two values; infinite where one is not finite."""
    if not all(map(math.isfinite, pair)):
        return math.inf
    return abs(pair[0] - pair[1]) / max(map(abs, pair))


def _ragged(batch_sizes: list[int], examples: dict[int, int], accumulated: int) -> list[int]:
    """Return a batch size whose last validation batch is short, if that of the smallest and the largest is not."""

    def is_ragged(batch_size: int) -> bool:
        return any(n % (batch_size // accumulated) for n in examples.values())

    if is_ragged(min(batch_sizes)) or is_ragged(max(batch_sizes)):
        return []
    return [batch_size for batch_size in sorted(batch_sizes) if is_ragged(batch_size)][:1]


def _is_equal(one: float, two: float, setup: StudySetup) -> bool:
    if not (math.isfinite(one) and math.isfinite(two)):
        return math.isfinite(one) == math.isfinite(two)
    precision = str(setup.workload.trainer.get("precision") or "32")
    is_full = precision.startswith(("32", "64")) and not setup.on_gpu
    return math.isclose(one, two, rel_tol=ROUNDING if is_full else ROUNDING_OF_HALF, abs_tol=1e-7)


def _spread(training: Training, one: Trial, two: Trial, metric: str) -> float | None:
    """Return the range of a random metric of one network, where it explains the difference of two trials; else None."""
    values = []
    for trial in (one, two):
        looks = [look_at(training, trial, seed)[0] for seed in range(REPEATS)]
        values.append([look[0][metric] for look in looks if look])
    ranges = [max(found) - min(found) for found in values]
    gap = abs(sum(values[0]) / len(values[0]) - sum(values[1]) / len(values[1]))
    if not sum(ranges) or gap > 3 * sum(ranges):
        return None
    return max(ranges)


class _Looked(Exception):
    """A fit has ended once its network was looked at."""


def look_at(training: Training, trial: Trial, seed: int | None = None) -> tuple[list[dict[str, float]], dict[int, int]]:
    """Validates the untrained network of a trial, and the same with noise on its weights.

    Args:
        training: What the trials have in common.
        trial: The trial; it is not trained.
        seed: Of what validation draws; by default that of the trial.

    Returns:
        The metrics of both networks by name, and the examples of a check by data loader; nothing if validation fails.
    """
    goal = GoalErrorCallback(**{**training.goal, "early_reject": False})
    run = Run(trial, goal.goal, metrics=training.metrics)
    fit = TrialFit.of(training, run, goal)
    look = _Look(goal)
    with isolated(seed=trial.seed_for("order") if seed is None else seed), suppress(Exception):
        fit.trainer(last=[look]).fit(fit.built.module, datamodule=fit.built.data)
    return look.found, goal.validated.first or {}


class _Look(Callback):
    """Validates before the first step, once as the network is and once with noise on its weights; then ends the fit."""

    def __init__(self, goal: GoalErrorCallback):
        self.goal = goal
        self.found: list[dict[str, float]] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.found.append(self.goal.look(trainer))
        perturb(pl_module)
        self.found.append(self.goal.look(trainer))
        raise _Looked


def perturb(module: LightningModule) -> None:
    """Add noise to the weights of a module, always the same."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                # large beside the weights, since an untrained network tells examples little apart
                scale = PERTURBATION + 2 * parameter.square().mean().sqrt()
                parameter += scale * noise
