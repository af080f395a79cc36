"""The report of a study with its files: what `analyze` prints, and what a study ends with."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import lit_dps.analysis.unchanged as unchanged
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.report import render
from lit_dps.analysis.tables import write_csv
from lit_dps.files import replacing


def figures_folder(folder: str | Path, study: str) -> Path:
    """Where the figures of a study go below the storage folder."""
    return Path(folder) / "figures" / study.replace(" ", "_").replace(":", "_")


def goal_folder(folder: Path, error: float) -> Path:
    """Where the tables and figures of a further goal go below those of the study."""
    return folder / f"goal-{error:g}"


def publish(study: Analysis, folder: Path) -> tuple[str, list[Path]]:
    """Writes the tables and figures of a study into a folder, those of each further goal into a folder below it.

    Those that are there from an equal study are left as they are (`unchanged`).

    Returns:
        The report as text, first of the study's own goal, with the files' paths and notes on them below it; the paths.
    """
    source = unchanged.made_from(study.record)
    if (found := unchanged.kept(folder, source)) is None:
        found = write_goals(study, folder)
        unchanged.keep(folder, source, *found)
    files, notes = found
    text = "\n".join(map(render, study.at_each_goal))
    return f"{text}\n{listing(files, notes)}", files


def write_goals(study: Analysis, folder: Path, only: Collection[str] | None = None) -> tuple[list[Path], list[str]]:
    """Writes what `publish` writes, or some of the figures alone.

    Returns:
        The files' paths, and notes on them, each once.
    """
    files, notes = write_all(study, folder, only)
    for further in study.at_each_goal[1:]:
        goal = further.record.goal
        more, said = write_all(further, goal_folder(folder, goal.value), only)
        files += more
        notes += [f"{goal}: {note}" for note in said if note not in notes]
    return files, notes


def write_all(study: Analysis, folder: Path | str, only: Collection[str] | None = None) -> tuple[list[Path], list[str]]:
    """Writes the tables and each figure of a study, as .csv, .png and .pdf, into a folder; also of an unfinished one.

    The tables are table.txt, table.csv and fits.csv; where terms of the theory were measured also theory.csv, those of
    the K* trials, and theory-ratios.csv, sparse over dense. Each file is replaced in one go.

    Args:
        study: The study at one goal.
        folder: Made if it is not there.
        only: Names of figures: these alone are written, and no table.

    Returns:
        The files' paths, and notes: what the study lacks for the figures left out, and what to know of the others.
    """
    from lit_dps.analysis.figures import FIGURES, write_figures  # matplotlib, only where something is drawn

    tables = write_tables(study, Path(folder)) if only is None else []
    files, notes = write_figures(FIGURES, [study], folder, only)
    return [*tables, *files], notes


def write_tables(study: Analysis, folder: Path) -> list[Path]:
    """Writes the tables that `write_all` writes."""
    with replacing(folder / "table.txt") as temporary:
        temporary.write_text(render(study), encoding="utf-8")
    tables = {"table.csv": study.table, "fits.csv": study.laws}
    if study.theory["delta"].notna().any() or study.term_ratios["pairs"].any():
        tables |= {"theory.csv": study.theory, "theory-ratios.csv": study.term_ratios}
    tables = {folder / name: table for name, table in tables.items() if len(table)}  # no ratios at one sparsity
    for path, table in tables.items():
        write_csv(table, path)
    return [folder / "table.txt", *tables]


def listing(files: Sequence[Path], notes: Sequence[str]) -> str:
    """The lines that say what was written, files that differ in their suffix on one, and what to know of it."""
    kinds: dict[Path, list[str]] = {}
    for path in files:
        kinds.setdefault(path.with_name(path.stem), []).append(path.suffix[1:])
    lines = ["written:"] if files else ["nothing written"]
    for stem, suffixes in kinds.items():
        lines.append(f"  {stem}.{suffixes[0] if len(suffixes) == 1 else '{' + ','.join(suffixes) + '}'}")
    return "\n".join([*lines, *([""] if notes else []), *(f"note: {note}" for note in notes)]) + "\n"
