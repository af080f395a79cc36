"""check_reading: the conformance test of a reading."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping

import torch

from lit_dps.core.attempt import Attempt
from lit_dps.core.errors import ConfigError
from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell, Trial
from lit_dps.readings.attempt_readings import SHORT_STEPS, AttemptReadings
from lit_dps.readings.reading import Reading, check_attributes
from lit_dps.testing.failure import ConformanceError, require
from lit_dps.testing.toy import BATCH_SIZE, LEARNING_RATE, ToyRun
from lit_dps.training.hidden_state import capture_attributes, equal_states, preserve_rng_state

SPARSITY = 0.5
SAVED = (
    "state in attributes that are numbers, texts, tensors, lists or dicts, or in state_dict and "
    "load_state_dict"
)

Rows = list[dict[str, float]]  # what a reading returns after each step, by column


def check_reading(reading: Reading | type[Reading]) -> None:
    """Raise ConformanceError if a reading does not do what lit_dps requires.

    A pruned network of 52 parameters is read after its first two steps, a dense one after one step.

    - It has a name, a valid `when`, and an `interval` of at least 1.
    - It returns numbers by column, for the same columns each time, with and without masks. One
      parameter is not trained, and requires no gradient.
    - The weights of the trained network and its data module stay as they are.
    - Equal runs give equal numbers, unless the reading measures the process (`stacked = False`).
    - A run that is saved and resumed has the same numbers as an uninterrupted one.

    A study runs all of this before it starts.

    Args:
        reading: The reading as it is built for a trial, or its class if it takes no arguments.
    """
    if isinstance(reading, type):
        reading = reading()
    name = type(reading).__name__
    try:
        check_attributes(reading, name)
    except ConfigError as error:
        require("attributes", False, f"{name} is not valid", str(error.allowed), f"{name}()")
    with preserve_rng_state(seed=0):
        rows = _read(reading, SPARSITY, SHORT_STEPS)
        _check_resumed(reading, rows)
        _check_dense(reading, rows)


def _read(reading: Reading, sparsity: float, steps: int, resumes: bool = False) -> Rows:
    """Return what copies of a reading read after each step of a run.

    Args:
        reading: The reading; it is not used itself.
        sparsity: The sparsity of the run.
        steps: Its steps.
        resumes: Whether the run is saved and resumed after its first step.
    """
    run = ToyRun(sparsity)
    attempt, readings = _attempt(reading, sparsity)
    rows = []
    for step in range(1, steps + 1):
        if resumes and step > 1:
            attempt, readings = _resumed(reading, sparsity, readings)
        readings.before(step, run)
        run.train_step()
        readings.count(LEARNING_RATE)
        rows.append(_read_once(reading, run, attempt, readings, step))
    return rows


def _attempt(reading: Reading, sparsity: float) -> tuple[Attempt, AttemptReadings]:
    """Return a fresh attempt, and a copy of a reading that it takes after each step."""
    trial = Trial(Cell(BATCH_SIZE, sparsity), 0)
    attempt = Attempt(trial, Goal(0.5, check_interval=1, max_steps=SHORT_STEPS))
    return attempt, AttemptReadings([copy.deepcopy(reading)], attempt, is_short=True)


def _resumed(
    reading: Reading, sparsity: float, before: AttemptReadings
) -> tuple[Attempt, AttemptReadings]:
    """Return a fresh attempt and its readings, with the saved state of readings."""
    attempt, readings = _attempt(reading, sparsity)
    try:
        file = io.BytesIO()
        torch.save(before.state_dict(), file)
        file.seek(0)
        readings.load_state_dict(torch.load(file, weights_only=True))
    except Exception as error:
        what = f"{type(reading).__name__} cannot be resumed: {type(error).__name__}: {error}"
        require("resumed", False, what, SAVED, "a run that is saved after its first step")
    return attempt, readings


def _read_once(
    reading: Reading, run: ToyRun, attempt: Attempt, readings: AttemptReadings, step: int
) -> dict[str, float]:
    """Return what a reading returns after a step, by column."""
    name = type(reading).__name__
    shown_by = f"step {step} of {run}"
    before = _data_state(run)
    try:
        readings.read(step, run)
    except ConfigError as error:
        require("valid", False, f"{name} is refused", str(error.allowed), shown_by)
    require(
        "data",
        equal_states(before, _data_state(run)),
        f"{name} changes the data module",
        "data that are only read",
        shown_by,
    )
    row = dict(attempt.end_readings)
    for column, values in attempt.readings.get(reading.name, {}).items():
        if column != "step":
            row[column] = values[-1]
    return row


def _data_state(run: ToyRun) -> tuple:
    """Return a copy of the data module's attributes and images."""
    images = run.data_module.images
    tensors = [tensor.clone() for tensor in (*images.x.values(), *images.y.values())]
    return capture_attributes(run.data_module), tensors


def _check_resumed(reading: Reading, rows: Rows) -> None:
    """Check that equal runs, and a resumed one, give equal numbers."""
    if not reading.stacked:
        return
    name = type(reading).__name__
    resumed = _read(reading, SPARSITY, SHORT_STEPS, resumes=True)
    if equal_states(rows, resumed):
        return
    for step, row in enumerate(_read(reading, SPARSITY, SHORT_STEPS), start=1):
        require(
            "repeated",
            equal_states(rows[step - 1], row),
            f"{name} returns {_text(rows[step - 1])}, and {_text(row)} in an equal run",
            "equal numbers; a reading that measures the process sets stacked = False",
            f"step {step} of {ToyRun(SPARSITY)}",
        )
    require(
        "resumed",
        False,
        f"{name} returns {_text(resumed[-1])} in a resumed run, and {_text(rows[-1])} in an "
        "uninterrupted one",
        f"equal numbers, and {SAVED}",
        f"a run of {SHORT_STEPS} steps that is saved after the first one",
    )


def _check_dense(reading: Reading, rows: Rows) -> None:
    """Check that a network without masks has the same columns."""
    name = type(reading).__name__
    try:
        (dense,) = _read(reading, 0.0, steps=1)
    except ConformanceError:
        raise
    except Exception as error:
        what = f"{name} raises {type(error).__name__}: {error}"
        require("dense", False, what, "the columns of a pruned network", "a network without masks")
    require(
        "columns",
        set(dense) == set(rows[0]),
        f"{name} has the columns {sorted(dense)}, and {sorted(rows[0])} of a pruned network",
        "always the same columns",
        "a network without masks",
    )


def _text(row: Mapping[str, float]) -> str:
    return ", ".join(f"{column} = {value:.9g}" for column, value in row.items())
