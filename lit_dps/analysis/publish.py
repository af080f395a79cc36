"""The report of a study with its files: what `analyze` prints, and what a study ends with."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from lit_dps.analysis.figures import write_all
from lit_dps.analysis.goals import at_goal
from lit_dps.analysis.report import render
from lit_dps.analysis.scaling import FittedStudy, Scaling, scaling_of
from lit_dps.record import StudyRecord


def figures_folder(folder: str | Path, study: str) -> Path:
    """Where the figures of a study go below the storage folder."""
    return Path(folder) / "figures" / study.replace(" ", "_").replace(":", "_")


def goal_folder(folder: Path, error: float) -> Path:
    """Where the tables and figures of a further goal go below those of the study."""
    return folder / f"goal-{error:g}"


def publish(record: StudyRecord, folder: Path) -> tuple[str, dict[float, Scaling], list[Path]]:
    """Writes the tables and figures of a study into a folder, those of each further goal into a folder below it.

    Returns:
        The report as text, first of the study's own goal, with the files' paths and notes on them below it; the fitted
        laws by sparsity, at the study's own goal; and the paths.
    """
    (own, *further), files, notes = write_goals(record, folder)
    text = "\n".join(render(*study) for study in (own, *further))
    return f"{text}\n{listing(files, notes)}", dict(own.scalings), files


def write_goals(
    record: StudyRecord, folder: Path, only: Collection[str] | None = None
) -> tuple[list[FittedStudy], list[Path], list[str]]:
    """Writes what `publish` writes, or some of the figures alone (see `figures.write_all`).

    Returns:
        The study at each goal, its own first; the files' paths; and notes on them, each once.
    """
    study = FittedStudy(record, scaling_of(record))
    files, notes = write_all(record, folder, study.scalings, only)
    studies = [study]
    for error in record.goals:
        further = at_goal(record, error)
        studies.append(FittedStudy(further, scaling_of(further)))
        more, said = write_all(further, goal_folder(folder, error), studies[-1].scalings, only)
        files += more
        notes += [f"goal error {error:g}: {note}" for note in said if note not in notes]
    return studies, files, notes


def listing(files: Sequence[Path], notes: Sequence[str]) -> str:
    """The lines that say what was written, files that differ in their suffix on one, and what to know of it."""
    kinds: dict[Path, list[str]] = {}
    for path in files:
        kinds.setdefault(path.with_name(path.stem), []).append(path.suffix[1:])
    lines = ["written:"] if files else ["nothing written"]
    for stem, suffixes in kinds.items():
        lines.append(f"  {stem}.{suffixes[0] if len(suffixes) == 1 else '{' + ','.join(suffixes) + '}'}")
    return "\n".join([*lines, *([""] if notes else []), *(f"note: {note}" for note in notes)]) + "\n"
