"""What a report page says in words: the verdict, what was assumed, and how the study was made."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from lit_dps import __version__
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.repeats import intervals_of
from lit_dps.core.environment import KEY, SINCE
from lit_dps.core.search_space import short_names
from lit_dps.report.answer import sentences, timing_notes
from lit_dps.report.commands import again_command


def verdict(study: Analysis) -> list[str]:
    """A paragraph a series: the answer's sentences, then its critical batch size."""
    found = []
    for series, scaling in sorted(study.scalings.items()):
        first, *others = sentences(
            series, study.answer, study.rate_laws[series], study.validate_every
        )
        law = f"critical batch size, where half of the steps are due to noise: {scaling.describe()}"
        found.append(". ".join(_sentence(line) for line in (first, *others, law)) + ".")
    return found + [_sentence(line) + "." for line in timing_notes(study.record, study.answer)]


def _sentence(line: str) -> str:
    line = line.strip().rstrip(".")
    return line if "_" in line.split()[0] else line[:1].upper() + line[1:]


def assumed(study: Analysis) -> list[str]:
    """What the numbers of the page rest on, a line each."""
    record = study.record
    goal, names = record.goal, short_names(list(record.space))
    box = "; ".join(f"{names[key]} {values}" for key, values in record.space.items())
    lines = [
        f"K* is the fewest steps of {record.trials} trials, drawn by study.sampler "
        f"{record.config.get('study', {}).get('sampler', 'sobol')} from this box: {box}. More "
        "trials, or a wider box, "
        "can only lower it.",
        f"The goal, {goal}, is asked of the entire validation split every {goal.check_interval} "
        "steps, so K* is known "
        f"to that many; no trial takes more than {goal.max_steps:,}.",
        "The law K* = c1 / B + c2 is fitted robustly to log K*; intervals are 95 % "
        f"{intervals_of(study.scalings)}. "
        "Beyond the largest batch size it is an extrapolation.",
        "A point starts from the same weights and order of examples at every batch size and "
        "sparsity, from "
        f"study.seed {record.seed}; "
        + (
            f"the best {record.plan.points} of each cell ran again on {record.plan.count} fresh "
            "seeds."
            if record.plan.count
            else "each ran once, so that the luck of its seed is in K* (study.repeats tells it)."
        ),
        "Time to the goal is the number of steps, as the verdict counts them, times the time of a "
        "training step. It "
        "excludes the start of a trial and validation.",
    ]
    if record.slack is not None:
        lines.append(
            f"Trials stopped at {record.slack:g} times the best K of their cell so far: K* is the "
            "same."
        )
    return lines


def made(study: Analysis) -> list[tuple[str, str]]:
    """How the study was made, by name: commands, and the versions that its trials ran under."""
    rows = [
        (
            "Run it again",
            "save the configuration below as study.yaml; lit-dps study --config study.yaml",
        )
    ]
    if (again := again_command(study)) is not None:
        rows.append(("The trial of K* again", again))
    rows += [
        ("Trials ran under", text)
        for text in dict.fromkeys(map(_versions, study.record.environments))
    ]
    rows.append(
        (
            "This page",
            f"lit_dps {__version__}, optuna {version('optuna')}, plotly {version('plotly')}",
        )
    )
    return rows


def _versions(environment: Mapping[str, Any]) -> str:
    shown = []
    for name, value in environment.items():
        if isinstance(value, str) and name not in (KEY, SINCE):
            shown.append(f"{name.removeprefix('version.')} {value}")
    return ", ".join(shown)
