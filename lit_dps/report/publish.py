"""The report of a study with its files: what `analyze` prints, and what a study ends with.

Drawing takes seconds, and the same study gives the same files. So beside them lies a stamp,
`.made-from`: what they were made from, and what they were then.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Collection, Sequence
from importlib.metadata import version
from pathlib import Path

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.law_bootstrap import law_rows
from lit_dps.analysis.layers import jacobian_rows
from lit_dps.analysis.tables import write_csv
from lit_dps.core.atomic_write import NOT_WRITTEN, not_written, replacing
from lit_dps.core.config import folder_name
from lit_dps.core.errors import StorageError
from lit_dps.core.record import StudyRecord
from lit_dps.report.text import FILES, answered, render, sections

STAMP = ".made-from"
PAGE = "report.html"
SHOWN_FAILURES = 3  # of a folder that is read-only, all files fail alike
Written = tuple[list[Path], list[str]]  # the files' paths, and notes on them


def figures_folder(folder: str | Path, study: str) -> Path:
    """Where the figures of a study go below the storage folder."""
    return Path(folder) / "figures" / folder_name(study)


def goal_folder(folder: Path, error: float) -> Path:
    """Where the tables and figures of a further goal go below those of the study."""
    return folder / f"goal-{error:g}"


def publish(study: Analysis, folder: Path, show: Collection[str] = ()) -> tuple[str, list[Path]]:
    """Writes the files of `write_goals`, or leaves those that are there from an equal study as they
    are.

    Args:
        study: The study, finished or not.
        folder: Where the files go.
        show: What to tell beside the answer, the table, the law and the notes: of `report.SECTIONS`
            and "files".

    Returns:
        The report as text, first of the study's own goal, and where its page is; the files' paths.
    """
    source = f"{source_of(study.record)} {study.validate_every}"
    if (found := _kept(folder, source)) is None:
        found = write_goals(study, folder)
        stamp = {"source": source, "notes": found[1]}
        stamp["files"] = {str(path.relative_to(folder)): _digest(path) for path in found[0]}
        if not failures(found[1]):
            found[1].extend(_attempt(folder / STAMP, json.dumps(stamp)))
    files, notes = found
    text = "\n".join(answered(each, show) for each in study.at_each_goal)
    listed = f"{listing(files, notes)}\n" if FILES in show else ""
    failed = "".join(f"{line}\n" for line in failures(notes))
    return f"{text}\n{listed}{failed}{_whereabouts(study, folder, show)}", files


def failures(notes: Sequence[str]) -> list[str]:
    """Return the notes on files that could not be written: the first ones, and how many more there
    are."""
    failed = [note for note in notes if note.startswith(NOT_WRITTEN)]
    if len(failed) > SHOWN_FAILURES:
        more = len(failed) - SHOWN_FAILURES
        return [*failed[:SHOWN_FAILURES], f"{NOT_WRITTEN}{more} further files or figures"]
    return failed


def _attempt(path: Path, text: str) -> list[str]:
    """Write a text to a file. Returns a note if that fails, else nothing."""
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except StorageError as error:
        return [not_written(path.name, error)]
    return []


def _whereabouts(study: Analysis, folder: Path, show: Collection[str]) -> str:
    """Where the page of a study is, and what else there is to see."""
    left = [name for name in (*sections(study), FILES) if name not in show]
    more = f"more of it: --show {','.join(left)}\n" if left else ""
    if not (folder / PAGE).exists():
        return more
    return (
        f"report: {folder / PAGE}, to open or to send; its figures and tables lie beside it\n{more}"
    )


def source_of(record: StudyRecord) -> str:
    """A hash of a study, of the code that draws it and of what it draws with. Equal ones are equal
    files."""
    found = hashlib.sha256(f"{version('matplotlib')} {version('plotly')}".encode())
    package = Path(__file__).parents[1]
    for file in sorted(
        (*package.glob("core/*.py"), *package.glob("analysis/*.py"), *package.glob("report/**/*.*"))
    ):
        found.update(file.read_bytes())
    found.update(pickle.dumps(vars(record), protocol=5))
    return found.hexdigest()


def _kept(folder: Path, source: str) -> Written | None:
    """What was written of an equal source before; None if nothing was, or a file is gone or
    another."""
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        files = {folder / name: digest for name, digest in stamp["files"].items()}
        same = stamp["source"] == source and all(
            _digest(path) == digest for path, digest in files.items()
        )
        return (list(files), stamp["notes"]) if same else None
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ):  # whatever somebody made of it
        return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_goals(study: Analysis, folder: Path, only: Collection[str] | None = None) -> Written:
    """Writes the files of `write_all` into a folder, those of each further goal into a folder below
    it.

    Without `only` also report.html, the page of the study at all its goals.
    """
    files, notes = write_all(study, folder, only)
    if only is None:
        try:
            files.append(_write_page(study, folder / PAGE))
        except Exception as error:  # drawn by another library
            notes.append(not_written(PAGE, error))
    for further in study.at_each_goal[1:]:
        goal = further.record.goal
        more, said = write_all(further, goal_folder(folder, goal.value), only)
        files += more
        notes += [f"{goal}: {note}" for note in said if note not in notes]
    return files, notes


def write_all(study: Analysis, folder: Path | str, only: Collection[str] | None = None) -> Written:
    """Writes the tables and figures of a study at one goal, finished or not, into a folder, which
    is made.

    The tables are table.txt, table.csv, fits.csv, critical.csv and, where there is a K*,
    answer.csv; where terms of the theory were measured also theory.csv, those of the K* trials, and
    theory-ratios.csv, sparse over dense; where gradients were stale delay-law.csv and
    critical-delays.csv; where points were repeated repeats.csv and median-fits.csv; where weights
    were moved towards isometry isometry.csv. With `only`, names of figures, these alone are
    written, and no table. The notes are those of `figures.write_figures`. Each file is replaced in
    one go.
    """
    from lit_dps.report.figures import (
        FIGURES,
        write_figures,
    )  # matplotlib, only where something is drawn

    tables, failed = _write_tables(study, Path(folder)) if only is None else ([], [])
    files, notes = write_figures(FIGURES, [study], folder, only)
    return [*tables, *files], [*failed, *notes]


def _write_page(study: Analysis, path: Path) -> Path:
    from lit_dps.report.html import page  # plotly, only where something is drawn

    with replacing(path) as temporary:
        temporary.write_text(page(study), encoding="utf-8")
    return path


def _write_tables(study: Analysis, folder: Path) -> Written:
    failed = _attempt(folder / "table.txt", render(study))
    files = [] if failed else [folder / "table.txt"]
    tables = {"table.csv": study.table, "fits.csv": study.laws, "critical.csv": study.critical}
    if len(study.answer):
        tables |= {"answer.csv": study.answer}
    if study.theory["delta"].notna().any() or study.term_ratios["pairs"].any():
        tables |= {"theory.csv": study.theory, "theory-ratios.csv": study.term_ratios}
    if len(study.seeds):
        medians = law_rows(study.median_scalings)
        tables |= {"repeats.csv": study.seeds, "median-fits.csv": medians}
    if len(study.delays):
        tables |= {"delay-law.csv": study.delays, "critical-delays.csv": study.critical_delays}
    if len(moved := jacobian_rows(study.record)):
        tables |= {"isometry.csv": moved}
    tables = {
        folder / name: table for name, table in tables.items() if len(table)
    }  # no ratios at one sparsity
    for path, table in tables.items():
        try:
            write_csv(table, path)
            files.append(path)
        except StorageError as error:
            failed.append(not_written(path.name, error))
    return files, failed


def listing(files: Sequence[Path], notes: Sequence[str]) -> str:
    """The lines that say what was written, files that differ in their suffix on one, and what to
    know of it."""
    kinds: dict[Path, list[str]] = {}
    for path in files:
        kinds.setdefault(path.with_name(path.stem), []).append(path.suffix[1:])
    lines = ["written:"] if files else ["nothing written"]
    for stem, suffixes in kinds.items():
        lines.append(
            f"  {stem}.{suffixes[0] if len(suffixes) == 1 else '{' + ','.join(suffixes) + '}'}"
        )
    return (
        "\n".join([*lines, *([""] if notes else []), *(f"note: {note}" for note in notes)]) + "\n"
    )
