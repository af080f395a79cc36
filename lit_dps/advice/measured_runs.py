"""The time that stored runs of `advise` took, to be compared with the timed steps."""

from __future__ import annotations

from dataclasses import dataclass

from lit_dps.advice.pilot_evidence import results_at
from lit_dps.advice.question import Question
from lit_dps.advice.step_probe import without_wait
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import TrialResult


@dataclass(frozen=True)
class MeasuredRuns:
    """The seconds of a step of runs, under the load of other programs while steps were timed.

    So runs that other programs slow down more or less than the timed steps take no more or less.

    Attributes:
        environment: The key of this environment. Runs of another one may be of another machine.
        subtracts_wait: Whether the wait for a CPU is left out, as of the timed steps.
        slowdown: The seconds of the timed steps over those without the wait.
    """

    environment: str | None
    subtracts_wait: bool
    slowdown: float

    @classmethod
    def of(cls, question: Question) -> MeasuredRuns:
        """Return those of a question."""
        setup = question.probes.setup
        # A GPU works while the process waits. Of several ranks only one measures its wait.
        subtracts_wait = not setup.on_gpu and question.ranks == 1
        slowdown = question.times.slowdown if subtracts_wait else 1.0
        return cls(setup.environment.key, subtracts_wait, slowdown)

    def step_seconds(self, run: TrialResult | None) -> float | None:
        """Return the mean seconds of a step of a run with its share of validation.

        Of a resumed run, the last process counts.

        Returns:
            None without a run, or if it was not timed, or in another environment.
        """
        if run is None or not self._is_timed_here(run):
            return None
        timed = run.timed
        seconds = timed["training"] + timed["checking"]
        if self.subtracts_wait:
            seconds = self.slowdown * without_wait(seconds, timed.get("waited", 0.0))
        return seconds / timed["steps"]

    def other_seconds(self, run: TrialResult | None) -> float:
        """Return the seconds of the start and the readings of a run.

        Returns:
            0 if `step_seconds` is None, or if the run was resumed.
        """
        if run is None or not self._is_timed_here(run) or run.timed["steps"] < run.steps_run:
            return 0.0
        return max(run.seconds - run.timed["training"] - run.timed["checking"], 0.0)

    def _is_timed_here(self, run: TrialResult) -> bool:
        """Return True if the steps of a run were timed in this environment."""
        is_here = self.environment is not None and run.environment == self.environment
        return is_here and bool(run.timed.get("steps"))

    def step_seconds_at(self, record: StudyRecord | None, batch_size: int) -> float | None:
        """Return the least `step_seconds` of the runs at a batch size; None without one."""
        known = []
        for run in results_at(record, batch_size):
            seconds = self.step_seconds(run)
            if seconds is not None:
                known.append(seconds)
        return min(known, default=None)
