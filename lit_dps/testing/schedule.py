"""check_schedule: the conformance test of a schedule of the batch size."""

from __future__ import annotations

import copy
from itertools import islice

from lit_dps.core.batch_schedule import BatchSchedule
from lit_dps.core.errors import ConfigError
from lit_dps.testing.failure import ConformanceError, require

BATCH_SIZE = 64
STEPS = 200


def check_schedule(
    schedule: BatchSchedule | type[BatchSchedule],
    batch_size: int = BATCH_SIZE,
    steps: int = STEPS,
) -> None:
    """Raise ConformanceError if a schedule of the batch size does not do what lit_dps requires.

    - Each size is an integer from 1 to the batch size of the cell.
    - A size depends on the arguments of `size` alone: the same question has the same answer in
      every order, also by a new schedule, as in a resumed run.

    A study runs all of this before it starts.

    Args:
        schedule: The schedule, or its class if it takes no arguments.
        batch_size: The batch size of a cell, which is the largest size.
        steps: Steps to ask for.
    """
    if isinstance(schedule, type):
        schedule = schedule()
    name = type(schedule).__name__
    fresh = copy.deepcopy(schedule)
    try:
        sizes = list(islice(schedule.sizes(batch_size), steps))
    except ConfigError as error:
        shown_by = f"a cell of B = {batch_size}"
        raise ConformanceError("valid", f"{error.value}", f"{error.allowed}", shown_by) from error
    examples = sum(sizes)
    for step in reversed(range(steps)):
        examples -= sizes[step]
        again = [each.size(step, examples, batch_size) for each in (schedule, fresh)]
        require(
            "repeated",
            again == [sizes[step]] * 2,
            f"{name}.size returns {sizes[step]}, then {again[0]}, and {again[1]} in a resumed run",
            "equal sizes for equal arguments, without random numbers and state",
            f"step {step} after {examples} examples, B = {batch_size}",
        )
