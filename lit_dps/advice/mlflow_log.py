"""What MLflow shows of advice: its stages and its answer, on the run of the study that probes."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from lit_dps.advice.answer import Answer
from lit_dps.advice.question import Question
from lit_dps.analysis.analysis import Analysis
from lit_dps.core.record import StudyRecord
from lit_dps.readings.branching import Fork
from lit_dps.tracking.description import markdown

SHOWN = "batch_size", "devices", "steps", "hours"  # of the recommended row


def show(case: Question) -> None:
    """All that was measured so far, beside the trials of the probes, which are shown as they end.

    Curves have the local batch size, the number of the run, or the step of the fork on their axis.
    """
    kept, times = case.store.read(), case.times
    curves: dict[str, dict[int, float]] = {}
    for row in times.timed:
        on = "" if row.devices == 1 else f"_on_{row.devices}_devices"
        curves.setdefault(f"advice/step_seconds{on}", {})[int(row.local_batch)] = row.seconds
    for number, each in enumerate(kept.get("confirmed", []), start=1):
        name = "advice/run_steps" if each["steps"] else "advice/run_steps_without_goal"
        curves.setdefault(name, {})[number] = each["steps"] or each["most"]
    for fork in map(Fork.from_dict, kept.get("branches", [])):
        low, high = fork.critical
        curves.setdefault("advice/critical_at_least", {})[fork.step] = low
        if math.isfinite(high):
            curves.setdefault("advice/critical_below", {})[fork.step] = high
    metrics = {"advice/check_seconds": times.check}
    if case.noise is not None:
        metrics["noise_scale_low"] = case.noise.low
        metrics |= {"noise_scale": case.noise.value} if case.noise.resolved else {}
    case.work.view.log_outcome(metrics, curves)


def show_answer(
    case: Question, record: StudyRecord | None, found: Answer, files: Sequence[Path], text: str
) -> None:
    """The answer: its numbers, its files, and its sentences in the description of the run."""
    view, said = (
        case.work.view,
        f"    {text.strip()}".replace("\n", "\n    "),
    )  # indented, Markdown leaves it as it is
    if record is not None:
        study = Analysis(record)
        view.sync(record, study, files)  # `analyze` draws the probes, which takes seconds
        said += f"\n\n{markdown(study)}"
    best = {} if found.best is None else {f"advice/{key}": float(found.best[key]) for key in SHOWN}
    view.log_outcome(best, files=files, note=said, has_ended=True)
    if view.experiment_id is not None:
        print(f"the stages and this answer are in MLflow, study {case.work.name}", file=sys.stderr)
