"""The gradient noise scale of a study before it starts, as a first guess of B_crit.

A short run of the dense network measures it (McCandlish et al. 2018, Section 2.2).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dps.core.attempt import Attempt
from lit_dps.core.errors import UserError, first_line
from lit_dps.core.local_sgd import LocalSGDSchedule
from lit_dps.core.noise_scale import NoiseScale, reading_batch_size
from lit_dps.core.text import format_duration
from lit_dps.core.trial import Cell, Trial, Value
from lit_dps.readings import NoiseScaleCallback
from lit_dps.study.probe_run import EndProbe, probe_run
from lit_dps.study.setup import StudySetup

STEPS = 64  # of the short run; the gradient is measured at each
# A slower run ends after this time. Its readings are fewer, which is printed and stored.
MAX_SECONDS = 60.0


def first_guess(setup: StudySetup, at_step: Callable[[], None] = lambda: None) -> NoiseScale | str:
    """Measure the noise scale along the first steps of a study's dense network.

    It is measured at the first value of each axis, which the result names. Metaparameters are at
    the middle of their ranges, and seeds are the seeds of point 0. The run takes place in this
    process, on one device. It stores nothing, and removes what the module writes into the folder of
    its trial.

    Args:
        setup: A study that was checked.
        at_step: Called after each step; may raise to end the run.

    Returns:
        The noise scale, or the reason why it was not measured, as one line.
    """
    batch_size = reading_batch_size(setup.study.batch_sizes)
    return short_run(setup, batch_size, setup.middle, STEPS, MAX_SECONDS, at_step)


def short_run(
    setup: StudySetup,
    batch_size: int,
    params: Mapping[str, Value],
    steps: int,
    seconds: float,
    at_step: Callable[[], None] = lambda: None,
) -> NoiseScale | str:
    """Measure the noise scale along a short run of the dense network.

    The number of readings is `steps`, and so the same on every machine, unless the run is slower
    than `seconds`. The result has both numbers, and whether the time ended the run.

    Args:
        setup: A study that was checked.
        batch_size: The batch size of the run.
        params: The metaparameters of the run.
        steps: The length of the run.
        seconds: The run ends after this time.
        at_step: Called after each step; may raise to end the run.

    Returns:
        The noise scale, or the reason why it was not measured, as one line.
    """
    setup = setup.with_constant_batch()
    trial = _trial_of(setup, batch_size, params)
    attempt = Attempt(trial, setup.unreachable_goal(steps))
    one_worker = dataclasses.replace(setup, local=LocalSGDSchedule())
    measured = NoiseScaleCallback()
    limit = _EndRun(steps, seconds, at_step)
    try:
        probe_run(one_worker, attempt, [measured, limit])
    except UserError as error:
        return str(error)
    except Exception as error:
        # For example, a module may not accept a part of its batch. Other failures will show in the
        # trials.
        return f"{type(error).__name__}: {first_line(error)}"
    scale = measured.scale()
    if scale is None:
        count = len(measured.readings["step"])
        stopped = ""
        if limit.stopped:
            stopped = f", stopped after {format_duration(seconds, 2)}"
        return f"{count} of {steps} readings{stopped}; it needs at least 2 finite readings"
    return dataclasses.replace(
        scale,
        planned=steps,
        stopped_after=seconds if limit.stopped else None,
        axes=dict(trial.cell.axes) or None,
    )


def _trial_of(setup: StudySetup, batch_size: int, params: Mapping[str, Value]) -> Trial:
    """Return the trial of the dense network, trained as one network.

    Workers of local SGD would measure gradients on parts of the batch.
    """
    axes = []
    for key, value in setup.study.cells[0].axes:
        if not key.startswith(("pruning.", "local.")):
            axes.append((key, value))
    params = {key: value for key, value in params.items() if not key.startswith("local.")}
    return Trial(Cell(batch_size, 0.0, tuple(axes)), 0, params, setup.study.seed)


class _EndRun(Callback):
    """Ends a run after a number of steps or seconds.

    Attributes:
        stopped: Whether the seconds ended it.
    """

    stopped = False

    def __init__(self, steps: int, seconds: float, at_step: Callable[[], None]):
        self.steps = steps
        self.end = time.monotonic() + seconds
        self.at_step = at_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: object
    ) -> None:
        self.at_step()
        if trainer.global_step >= self.steps:
            raise EndProbe
        if time.monotonic() > self.end:
            self.stopped = True
            raise EndProbe
