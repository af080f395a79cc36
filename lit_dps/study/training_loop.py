"""Which loop trains the trials of a study, in words, before the study begins."""

from __future__ import annotations

from collections import Counter

from lit_dps.core.trial import LIGHTNING, SINGLE, STACKED, Trial
from lit_dps.engines.interval_loop import IntervalLoop, LoopChoice
from lit_dps.study.setup import StudySetup

DESCRIPTIONS = {
    SINGLE: "lit_dps' own loop, one network at a time",
    STACKED: "lit_dps' own loop, several networks at once",
    LIGHTNING: "Lightning's own loop, slower with equal results",
}


def describe_loops(setup: StudySetup) -> str:
    """Return which loop trains the trials, with the number of cells if loops differ.

    A trial in the middle of the search space decides for the cells that differ in their batch size
    or their pruning alone. Results store the loop of each trial.
    """
    counts = Counter(_choices(setup))
    if len(counts) == 1:
        return f"trains with {_describe(next(iter(counts)))}"
    parts = []
    for choice, cells in counts.most_common():
        parts.append(f"{cells} cells with {_describe(choice)}")
    return f"trains {'; '.join(parts)}"


def _choices(setup: StudySetup) -> list[LoopChoice]:
    """Return the loop of each cell."""
    engine = setup.engine()
    if not isinstance(engine, IntervalLoop):
        return [LoopChoice(LIGHTNING, setup.reason_for_lightning or "")] * len(setup.cells)
    by_axes: dict[tuple, LoopChoice] = {}
    choices = []
    for cell in setup.cells:
        axes = tuple(pair for pair in cell.axes if not pair[0].startswith("pruning."))
        if axes not in by_axes:
            by_axes[axes] = engine.choose(Trial(cell, 0, setup.middle, setup.study.seed))
        choices.append(by_axes[axes])
    return choices


def _describe(choice: LoopChoice) -> str:
    text = f"engine {choice.engine} ({DESCRIPTIONS[choice.engine]})"
    return f"{text}, because {choice.reason}" if choice.reason else text
