"""What a run of the benchmarks may be told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Sizes of the measurements.

    Attributes:
        quick: Whether everything runs on digits data, small.
        repeats: Rounds of each comparison of speeds.
        seconds: Seconds that a timed run of steps is to last.
        trials: Trials of a cell of the protocol, where the paper has 100; one number a batch size,
            the last one for all others.
        batch_sizes: Batch sizes of the protocol's cells.
        goal_error: Goal validation error of the protocol and of the checks.
        max_steps: Step budget of the protocol.
        calibrate: How many outraced trials of a cell run to the end of the budget to learn how long
            they are; likewise.
        sample: How many trials of each cell run both ways, to see the same result.
        stored: Stored trials that the time of one more is measured at.
        study_seconds: Time limit of the study in the section "stacked".
    """

    quick: bool = False
    repeats: int = 5
    seconds: float = 1.0
    trials: tuple[int, ...] = (
        100,
        8,
        4,
    )  # steps get longer, and what trials add is known from the first cell
    batch_sizes: tuple[int, ...] = (16, 128, 1024)
    goal_error: float = 0.02
    max_steps: int = 40_000
    calibrate: tuple[int, ...] = (16, 0)  # 40,000 steps take minutes at B = 16, hours at B = 1024
    sample: int = 3
    stored: tuple[int, ...] = (100, 1_000, 10_000)
    study_seconds: float = 50.0

    def at(self, batch_size: int, numbers: tuple[int, ...]) -> int:
        """The number for a batch size, of `trials` or `calibrate`."""
        return numbers[min(self.batch_sizes.index(batch_size), len(numbers) - 1)]


FULL = Options()
QUICK = Options(
    quick=True,
    repeats=2,
    seconds=0.02,
    trials=(6,),
    batch_sizes=(16,),
    goal_error=0.3,
    max_steps=64,
    calibrate=(1,),
    sample=2,
    stored=(4, 16),
    study_seconds=120.0,
)
