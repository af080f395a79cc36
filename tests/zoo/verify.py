"""What must be true of every study that works, and of every one that is refused."""

from __future__ import annotations

import re
from collections.abc import Collection

import pytest

from lit_dps.core.trial import TrialResult
from tests.zoo.auditor import Audit, Check
from tests.zoo.run import Outcome


def assert_refused(outcome: Outcome, *said: str) -> None:
    """Exit code 2, one line on stderr that all these patterns are found in, in whatever case, and
    nothing created."""
    assert outcome.code == 2, outcome.out + outcome.err
    assert outcome.err.startswith("lit-dps: error: ") and outcome.err.count("\n") == 1, outcome.err
    assert not (outcome.folder / "mlruns").exists()
    for pattern in said:
        assert re.search(pattern, outcome.err, re.IGNORECASE), outcome.err


def assert_works(outcome: Outcome, ended: Collection[str] = ("complete", "incomplete")) -> None:
    """Exit code 0, or 3 if no trial is complete; a result of every trial, and each as the auditor
    saw it.

    Args:
        outcome: The study.
        ended: How its trials may end.
    """
    is_reached = any(result.status == "complete" for result in outcome.results)
    assert outcome.code == (0 if is_reached else 3), outcome.err
    record = outcome.study
    assert all(len(results) == record.trials for results in record.results.values()), outcome.err
    for result in outcome.results:
        assert result.status in ended, f"{result.trial.cell}: {result.status} {result.failure}"
        assert_as_audited(outcome, result)


def assert_as_audited(outcome: Outcome, result: TrialResult) -> None:
    """What is stored of a trial is what happened."""
    audit = outcome.audit(result)
    _batches(audit, result)
    _checks(audit, outcome.checks(audit, result), result, outcome.goal)
    _pruned(audit, result)
    if result.status != "stopped":
        assert len(audit.steps) == audit.checks[-1].step, "it trained on behind its last check"
        assert audit.again == pytest.approx(audit.checks[-1].error, abs=1e-6), (
            "the final weights have another error"
        )


def _batches(audit: Audit, result: TrialResult) -> None:
    batch_size, steps = result.trial.cell.batch_size, audit.steps
    assert max(steps) == batch_size, (
        f"{result.trial.cell} took steps of {sorted(set(steps))} examples"
    )
    short = [examples for examples in steps if examples < batch_size]
    assert len(short) == result.flags.get("short_steps", 0), (
        f"steps of {sorted(set(short))} examples are not told"
    )


def _checks(audit: Audit, checks: list[Check], result: TrialResult, goal: dict) -> None:
    interval, error = goal["check_interval"], goal["error"]
    assert [check.step for check in checks] == [interval * (i + 1) for i in range(len(checks))]
    assert all(list(check.examples.values()) == audit.split for check in audit.checks)
    met = [check.step for check in checks if check.error <= error]
    if result.status == "complete":
        assert met == [result.steps] == [checks[-1].step]
    else:
        assert met == [] and result.steps is None
    if result.status == "incomplete":
        assert checks[-1].step == goal["max_steps"]


def _pruned(audit: Audit, result: TrialResult) -> None:
    sparsity, mask = result.trial.cell.sparsity, audit.mask
    kept = {name: (int(keep.sum()), keep.numel()) for name, keep in mask.items()}
    assert kept == {name: tuple(counts) for name, counts in result.kept.items()}
    assert bool(mask) == (sparsity > 0)
    if mask:
        total = sum(size for _, size in kept.values())
        assert sum(left for left, _ in kept.values()) == round((1 - sparsity) * total)
        assert audit.pruned == 0, f"a pruned weight stood at {audit.pruned}"
        assert audit.seen >= len(audit.steps) + len(audit.checks)
