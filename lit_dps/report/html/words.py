"""The texts of a report page: the verdict, the assumptions, and how the study was made."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from lit_dps import __version__
from lit_dps.analysis.analysis import Analysis
from lit_dps.core.environment import KEY, SINCE
from lit_dps.core.record import StudyRecord, setting
from lit_dps.core.search_space import short_names
from lit_dps.report.answer import sentences, timing_notes
from lit_dps.report.commands import again_command
from lit_dps.report.repeats import LAW_INTERVALS


def verdict(study: Analysis) -> list[str]:
    """Return a paragraph per series, the answer and the critical batch size, and timing notes."""
    paragraphs = []
    for series, scaling in sorted(study.scalings.items()):
        rate_law = study.rate_laws[series]
        lines = sentences(series, study.answer, rate_law, study.validate_every)
        lines.append(
            f"critical batch size, where half of the steps are due to noise: {scaling.describe()}"
        )
        paragraphs.append(". ".join(_sentence(line) for line in lines) + ".")
    for line in timing_notes(study.record, study.answer):
        paragraphs.append(_sentence(line) + ".")
    return paragraphs


def _sentence(line: str) -> str:
    """Return a line without its last full stop, with a capital unless it begins with a key."""
    line = line.strip().rstrip(".")
    begins_with_key = "_" in line.split()[0]
    return line if begins_with_key else line[:1].upper() + line[1:]


def assumed(study: Analysis) -> list[str]:
    """Return what the numbers of the page rest on, a line each."""
    record = study.record
    goal = record.goal
    lines = [
        _search_text(record),
        f"The goal, {goal}, is tested on the entire validation split every {goal.check_interval} "
        "steps, so K* is known to within that interval. No trial takes more than "
        f"{goal.max_steps:,} steps.",
        f"The law K* = c1 / B + c2 is fitted robustly to log K*; {LAW_INTERVALS}. Beyond the "
        "largest batch size the law is an extrapolation.",
        _seeds_text(record),
        "Time to the goal is the number of steps, as in the verdict, times the time of a training "
        "step. It excludes validation and the start of a trial.",
    ]
    if record.race_factor is not None:
        lines.append(
            f"Trials were stopped early at {record.race_factor:g} times the best K of their cell "
            "so far. This does not change K*."
        )
    return lines


def _search_text(record: StudyRecord) -> str:
    """Return how the metaparameters were searched."""
    names = short_names(list(record.space))
    ranges = "; ".join(f"{names[key]} {box}" for key, box in record.space.items())
    sampler = setting(record.config, "study.sampler") or "sobol"
    return (
        f"K* is the smallest number of steps among {record.trials} trials. study.sampler {sampler} "
        f"drew them from this search space: {ranges}. More trials or a larger search space can "
        "only lower K*."
    )


def _seeds_text(record: StudyRecord) -> str:
    """Return how trials were seeded and repeated."""
    text = (
        "A sample starts from the same weights and order of examples at every batch size and "
        f"sparsity, from study.seed {record.seed}. "
    )
    if record.plan.count:
        best = "best sample"
        if record.plan.points > 1:
            best = f"{record.plan.points} best samples"
        return f"{text}The {best} of each cell ran again on {record.plan.count} fresh seeds."
    return f"{text}Each ran once, so K* includes the luck of its seed (study.repeats measures it)."


def made(study: Analysis) -> list[tuple[str, str]]:
    """Return how the study was made, by name: commands, and versions that its trials ran under."""
    rows = [
        (
            "Run it again",
            "save the configuration below as study.yaml; lit-dps study --config study.yaml",
        )
    ]
    command = again_command(study)
    if command is not None:
        rows.append(("Retrain the best trial", command))
    for text in dict.fromkeys(map(_versions, study.record.environments)):
        rows.append(("Trials ran under", text))
    page = f"lit_dps {__version__}, optuna {version('optuna')}, plotly {version('plotly')}"
    rows.append(("This page", page))
    return rows


def _versions(environment: Mapping[str, Any]) -> str:
    """Return the versions of an environment: python 3.11, torch 2.15."""
    shown = []
    for name, value in environment.items():
        if isinstance(value, str) and name not in (KEY, SINCE):
            shown.append(f"{name.removeprefix('version.')} {value}")
    return ", ".join(shown)
