"""What every engine has to agree on: how each trial ends, at which step, and what its curve
says."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from lit_dps.core.goal import Goal
from lit_dps.core.trial import TrialResult

STRADDLE = 2  # examples: as far as rounding may put two networks apart in the count of mistakes


def by_trial(results: Iterable[TrialResult]) -> dict[tuple, TrialResult]:
    found = list(results)
    named = {(r.trial.cell, r.trial.point): r for r in found}
    assert len(named) == len(found), "each trial once"
    return named


def assert_conform(
    ours: Iterable[TrialResult],
    reference: Iterable[TrialResult],
    goal: Goal,
    examples: int,
    loss: float = 2e-3,
) -> list[tuple]:
    """Asserts that two engines agree on every trial.

    A trial may end one check apart only where at the earlier check one error meets the goal, the
    other does not, and they differ by no more than `STRADDLE` examples.

    Args:
        ours: Results of an engine.
        reference: Results of another.
        goal: The goal.
        examples: Size of the validation split.
        loss: Relative tolerance of the training loss along the curve.

    Returns:
        The trials that ended one check apart.
    """
    ours, reference = by_trial(ours), by_trial(reference)
    assert ours.keys() == reference.keys()
    apart = []
    for key, theirs in reference.items():
        mine = ours[key]
        assert mine.kept == theirs.kept, key
        if (mine.status, mine.steps) != (theirs.status, theirs.steps):
            _assert_straddling(mine, theirs, goal, examples, key)
            apart.append(key)
            continue
        assert mine.curve["step"] == theirs.curve["step"], key
        assert mine.curve.keys() == theirs.curve.keys(), key
        assert mine.curve["train_loss"] == pytest.approx(
            theirs.curve["train_loss"], rel=loss, nan_ok=True
        ), key
        exact = zip(
            *(r.curve.get("exact", [1] * len(r.curve["step"])) for r in (mine, theirs)), strict=True
        )
        for i, both in enumerate(exact):
            if all(both):
                # The error of a network that diverged is nan.
                errors = [r.curve["val_error"][i] for r in (mine, theirs)]
                tolerance = (STRADDLE + 0.01) / examples
                assert errors[0] == pytest.approx(errors[1], abs=tolerance, rel=0, nan_ok=True), (
                    key,
                    mine.curve["step"][i],
                )
    return apart


def _assert_straddling(
    mine: TrialResult, theirs: TrialResult, goal: Goal, examples: int, key: tuple
) -> None:
    last = min(len(mine.curve["step"]), len(theirs.curve["step"])) - 1
    assert abs(len(mine.curve["step"]) - len(theirs.curve["step"])) <= 1, (
        f"{key}: more than a check apart"
    )
    errors = [r.curve["val_error"][last] for r in (mine, theirs)]
    assert abs(errors[0] - errors[1]) * examples <= STRADDLE + 0.01, (
        f"{key}: {errors} do not straddle {goal.value}"
    )
    assert goal.is_reached(min(errors)) and not goal.is_reached(max(errors)), key
