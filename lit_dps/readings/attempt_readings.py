"""AttemptReadings: takes the readings of one attempt, and stores them in it. Each loop calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lit_dps.core.attempt import Attempt
from lit_dps.core.errors import ConfigError
from lit_dps.core.goal import RESERVED_NAMES
from lit_dps.core.trial import Status, derive_seed
from lit_dps.module import weights_finite
from lit_dps.readings.reading import KEY, CurveReading, Moment, Reading, ReadRun
from lit_dps.training.hidden_state import (
    capture_attributes,
    preserve_rng_state,
    restore_attributes,
)

# How a trial ends whose readings of the end describe it. Other trials end where another trial or
# a person ends them.
READ_ENDS = (Status.COMPLETE, Status.INCOMPLETE)
# Steps of a dry run with readings: two show whether the columns stay the same.
SHORT_STEPS = 2


class AttemptReadings:
    """The readings of one attempt.

    Networks with weights that are not finite are not read: they diverged, which the next check
    finds.

    Args:
        readings: Fresh readings, for this attempt alone.
        attempt: The attempt. Its `readings` and `end_readings` receive the values.
        is_short: Whether each reading is taken after the first `SHORT_STEPS` steps, also those of
            the end, to test that this works.
    """

    def __init__(self, readings: Sequence[Reading], attempt: Attempt, is_short: bool = False):
        self._readings = readings
        self._attempt = attempt
        self._is_short = is_short
        self._has_started = False
        # In the order of the configuration, which is the order of the columns.
        for reading in self._readings:
            if reading.when != "end":
                attempt.readings[reading.name] = {"step": []}
            if isinstance(reading, CurveReading):
                attempt.curve_readers.append(partial(self._read_curve, reading))
                for column in reading.counted:
                    attempt.count(column)
        self._has_read_end = False
        # The name of the reading of each column; "" for columns of every curve.
        self._owners: dict[str, str] = {name: "" for name in RESERVED_NAMES}

    @property
    def flags(self) -> dict[str, float]:
        """The flags of the readings so far."""
        flags: dict[str, float] = {}
        for reading in self._readings:
            flags |= reading.flags
        return flags

    def _is_due(self, reading: Reading, step: int) -> bool:
        """Return True if a reading follows an optimizer step."""
        if isinstance(reading, CurveReading):
            return False
        if self._is_short:
            return step <= SHORT_STEPS
        if reading.when == "end":
            return False
        interval = reading.interval
        if reading.when == "check":
            interval = self._attempt.goal.check_interval
        return step % interval == 0

    def is_due(self, step: int) -> bool:
        """Return True if a reading follows an optimizer step."""
        return any(self._is_due(reading, step) for reading in self._readings)

    def _due_before(self, step: int) -> list[Reading]:
        """Return the readings that look at the network before an optimizer step."""
        due = []
        for reading in self._readings:
            if type(reading).before is not Reading.before and self._is_due(reading, step):
                due.append(reading)
        return due

    def due_steps(self, after: int, last: int) -> list[int]:
        """Return the steps after which the loop calls `read` and `before`.

        Args:
            after: The first step, exclusive.
            last: The last step, inclusive.
        """
        steps = []
        for step in range(after + 1, last + 1):
            if self.is_due(step) or self.is_due_before(step + 1):
                steps.append(step)
        return steps

    def is_due_before(self, step: int) -> bool:
        """Return True if a reading looks at the network before an optimizer step."""
        return not self._has_started or bool(self._due_before(step))

    def before(self, step: int, run: ReadRun) -> None:
        """Let readings look at the network before an optimizer step, and start before the first."""
        if not self._has_started:
            self._has_started = True
            for reading in self._readings:
                if type(reading).start is not Reading.start:
                    with self._moment(reading, step - 1, run) as moment:
                        reading.start(moment)
        for reading in self._due_before(step):
            with self._moment(reading, step - 1, run) as moment:
                reading.before(moment)

    def count(self, rate: float) -> None:
        """Count an optimizer step with its learning rate."""
        for reading in self._readings:
            reading.count(rate)

    def see_gradients(self, step: int, gradients: Callable[[], Mapping[str, Tensor]]) -> None:
        """Let the readings that follow an optimizer step look at its gradients.

        Args:
            step: The number of the step.
            gradients: Returns copies of the gradients, as `Reading.see_gradients` takes them.
        """
        for reading in self._readings:
            is_seeing = type(reading).see_gradients is not Reading.see_gradients
            if is_seeing and self._is_due(reading, step):
                reading.see_gradients(gradients())

    def read(self, step: int, run: ReadRun) -> dict[str, float]:
        """Take the readings that follow an optimizer step, and return their values by column.

        Raises:
            ConfigError: if a reading returns no numbers or changes the weights.
        """
        due = [reading for reading in self._readings if self._is_due(reading, step)]
        return self._read(due, step, run)

    @property
    def is_end_due(self) -> bool:
        """Whether the attempt has come to its own end, and a reading of the end remains."""
        has_ends = any(reading.when == "end" for reading in self._readings)
        return has_ends and not self._has_read_end and self._attempt.status in READ_ENDS

    def read_end(self, step: int, run: ReadRun) -> None:
        """Take the readings of the end; call it once `is_end_due`."""
        self._has_read_end = True
        self._read([reading for reading in self._readings if reading.when == "end"], step, run)

    def _read(self, readings: Sequence[Reading], step: int, run: ReadRun) -> dict[str, float]:
        """Take readings, unless the network has diverged; return their values by column."""
        if not readings or not weights_finite(run.module):
            return {}
        read = {}
        for reading in readings:
            with self._moment(reading, step, run) as moment:
                values = self._checked(reading, reading.read(moment))
            read |= values
            if reading.when == "end":
                self._attempt.end_readings.update(values)
            else:
                self._append(reading, step, values)
        return read

    def _read_curve(self, reading: CurveReading) -> None:
        """Take a reading of the curve, whose last check was just recorded."""
        curve = self._attempt.curve
        values = self._checked(reading, reading.read_curve(curve))
        self._append(reading, int(curve["step"][-1]), values)

    def _append(self, reading: Reading, step: int, values: Mapping[str, float]) -> None:
        """Add a row to the columns of a reading."""
        columns = self._attempt.readings[reading.name]
        if columns["step"] and set(values) != set(columns) - {"step"}:
            allowed = f"a reading whose columns are always {sorted(set(columns) - {'step'})}"
            raise ConfigError(KEY, reading.name, f"{allowed}, not {sorted(values)}")
        columns["step"].append(step)
        for name, value in values.items():
            columns.setdefault(name, []).append(value)

    @contextmanager
    def _moment(self, reading: Reading, step: int, run: ReadRun) -> Iterator[Moment]:
        """Yield what a reading may look at, and undo its side effects on the run afterwards."""
        purpose = f"reading {reading.name} at {step}"
        if self._attempt.trial is None:
            seed = derive_seed(0, purpose)
        else:
            seed = self._attempt.trial.seed_for(purpose)
        with preserve_rng_state(seed=seed), torch.enable_grad(), ExitStack() as stack:
            yield Moment(reading.name, step, run, stack, self._is_short)

    def _checked(self, reading: Reading, values: Any) -> dict[str, float]:
        """Return what a reading returned as floats.

        Raises:
            ConfigError: unless these are numbers by columns of this reading alone.
        """
        if not isinstance(values, Mapping) or not values:
            allowed = f"a reading that returns numbers by column, not {values!r}"
            raise ConfigError(KEY, reading.name, allowed)
        numbers = {}
        for column, value in values.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                value = value.item()
            if not isinstance(column, str) or not isinstance(value, Real):
                allowed = f"a reading that returns numbers by column, not {column!r}: {value!r}"
                raise ConfigError(KEY, reading.name, allowed)
            if self._owners.setdefault(column, reading.name) != reading.name:
                allowed = f"a reading whose column {column!r} has a name that no other column has"
                raise ConfigError(KEY, reading.name, allowed)
            numbers[column] = float(value)
        return numbers

    def state_dict(self) -> dict[str, Any]:
        """Return the values so far and the states of the readings, for a checkpoint."""
        states = {}
        for reading in self._readings:
            # Without its attributes, a reading that saves no state would resume with other values.
            states[reading.name] = {
                "attributes": capture_attributes(reading),
                "state": reading.state_dict(),
            }
        return {
            "started": self._has_started,
            "columns": self._attempt.readings,
            "ends": self._attempt.end_readings,
            "states": states,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values and the states of a checkpoint."""
        self._has_started = state["started"]
        self._attempt.readings = state["columns"]
        self._attempt.end_readings = state["ends"]
        for reading in self._readings:
            saved = state["states"][reading.name]
            restore_attributes(saved["attributes"], reading, is_resume=True)
            reading.load_state_dict(saved["state"])
