"""What `advise` concludes if the loss of a batch depends on how the batch is divided."""

from __future__ import annotations

from collections.abc import Sequence

from lit_dps.advice.step_probe import of_one_device
from lit_dps.core.attempt import Attempt
from lit_dps.core.trial import Trial
from lit_dps.study.preflight.parts_check import (
    BATCHES,
    LOSS,
    NORM,
    UNKNOWN,
    WEIGHTS,
    PartsProbe,
)
from lit_dps.study.probe_run import probe_run
from lit_dps.study.setup import StudySetup
from lit_dps.training.deterministic import full_float32

_REASONS = {
    LOSS: (
        "The loss of a batch differs from the mean loss of its halves, as a summed or contrastive "
        "loss does.",
        "have another loss",
    ),
    NORM: ("Batch norm uses the statistics of each batch.", "have other statistics"),
}


def note_on(dependence: str, is_accumulated: bool) -> str:
    """Return the note on what depends on the batch.

    Args:
        dependence: `LOSS`, `WEIGHTS`, `NORM` or `UNKNOWN`.
        is_accumulated: Whether the user accumulates batches.
    """
    if dependence == UNKNOWN:
        return (
            "It is unknown whether the loss of a batch is the mean over its parts. Rows with "
            "accumulation assume that it is."
        )
    if dependence == WEIGHTS:
        return (
            "The loss weights the examples of a batch by the whole batch, as a mean over tokens "
            "does. Accumulated batches weight the examples slightly differently. The answer "
            "ignores this."
        )
    reason, effect = _REASONS[dependence]
    if is_accumulated:
        return f"{reason} The parts of another size {effect}, here and on several devices."
    return (
        f"{reason} So there are no rows with accumulation, and parts of a batch on several "
        f"devices {effect}."
    )


def batch_dependence(setup: StudySetup, trial: Trial) -> list[str]:
    """Return what of a trial's loss depends on the batch; [] if nothing does.

    `LOSS`, `WEIGHTS` or `UNKNOWN`, and `NORM`, as a study that accumulates decides. A few steps on
    one device compare batches with their halves.

    Raises:
        Exception: An error of the module, its data or a callback.
    """
    probe = PartsProbe()
    attempt = Attempt(trial, setup.unreachable_goal(BATCHES))
    with full_float32():
        probe_run(of_one_device(setup), attempt, [probe])
    return probe.dependence()


def allows_accumulation(dependence: Sequence[str]) -> bool:
    """Return True if an accumulated batch trains about as the same batch at once."""
    return not {LOSS, NORM} & {*dependence}
