"""Writes the files of a study: tables, figures, report.html. Returns the report for the terminal.

Drawing takes seconds, and an equal study has equal files. The stamp `.made-from` beside the files
therefore holds a hash of what they were made from, and of each file; files are written again only
if one of these hashes changes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import pickle
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.law_tables import law_rows
from lit_dps.analysis.layers import jacobian_rows
from lit_dps.analysis.readings import reading_columns
from lit_dps.analysis.tables import count, has_values, write_csv
from lit_dps.core.atomic_write import NOT_WRITTEN, not_written, replacing
from lit_dps.core.config import folder_name
from lit_dps.core.errors import ConfigError, StorageError
from lit_dps.core.record import StudyRecord
from lit_dps.core.text import WIDTH, wrap
from lit_dps.report.screen import more_line, screen
from lit_dps.report.text import FILES, render

if TYPE_CHECKING:
    from lit_dps.report.figures import Picture

STAMP = ".made-from"
PAGE = "report.html"
SHOWN_FAILURES = 3  # in a read-only folder all files fail in the same way


class Written(NamedTuple):
    """The files of a study.

    Attributes:
        files: Their paths.
        notes: What to know of them: figures that are missing and why, failures.
    """

    files: list[Path]
    notes: list[str]


def figures_folder(folder: str | Path, study: str) -> Path:
    """Return where the files of a study are, below the storage folder."""
    return Path(folder) / "figures" / folder_name(study)


def goal_folder(folder: Path, error: float) -> Path:
    """Return where the files of a further goal are, below the folder of the study."""
    return folder / f"goal-{error:g}"


def publish(
    study: Analysis,
    folder: Path,
    show: Collection[str] = (),
    figures: Sequence[str] | None = None,
    width: int = WIDTH,
    ui: str = "",
) -> tuple[str, list[Path]]:
    """Write the files of a study, unless the folder has the files of an equal study.

    Args:
        study: The study, finished or not.
        folder: Where the files go.
        show: What the text includes beside the last screen: any of `text.SECTIONS`, and "files".
        figures: Names of modules with further figures; by default those of the written files.
        width: Columns of the terminal.
        ui: What follows the path of the report page: how to see the trials in MLflow.

    Returns:
        The last screen at each goal, that of the study first, and the paths of the files.
    """
    source = f"{source_of(study.record)} {study.validate_every}"
    stamp = _read_stamp(folder)
    further, notes = _figures_of(stamp.get("figures", {}) if figures is None else figures)
    written = _unchanged_files(folder, source, stamp, None if figures is None else further)
    if written is None:
        written = write_goals(study, folder, figures=further)
        written.notes.extend(notes)
        if not failures(written.notes):
            _delete_obsolete(folder, stamp, written.files)
            written.notes.extend(_write_stamp(folder, source, written, further))
    texts = []
    for each in study.at_each_goal:
        texts.append(screen(each, show, width))
    if FILES in show:
        texts.append(listing(*written, width=width))
    texts += failures(written.notes)
    places = more_line(study, show, width)
    if (folder / PAGE).exists():
        line = f"report: {folder / PAGE}{ui}"
        if len(line) > width:
            # Paths and commands are copied, so they stay whole.
            line = line.replace("; ", "\n", 1)
        places += f"{line}\n"
    return "\n".join(texts) + places, written.files


def failures(notes: Sequence[str]) -> list[str]:
    """Return the first notes on files that could not be written, and how many more there are."""
    failed = [note for note in notes if note.startswith(NOT_WRITTEN)]
    if len(failed) <= SHOWN_FAILURES:
        return failed
    more = len(failed) - SHOWN_FAILURES
    return [*failed[:SHOWN_FAILURES], f"{NOT_WRITTEN}{more} more files or figures"]


def _figures_of(names: Iterable[str]) -> tuple[list[ModuleType], list[str]]:
    """Return the figures of users' modules, and a note for each that cannot be imported."""
    figures = []
    notes = []
    for name in names:
        from lit_dps.report.figures import of_others  # imports matplotlib

        try:
            figures.append(of_others(name, "study.figures"))
        except ConfigError as error:
            notes.append(not_written(f"figure {name}", error))
    return figures, notes


def figures_of_files(folder: Path) -> tuple[list[ModuleType], list[str]]:
    """Return the figures of users among the written files of a study, and notes on missing ones."""
    return _figures_of(_read_stamp(folder).get("figures", {}))


def _digests_of(figures: Iterable[ModuleType]) -> dict[str, str]:
    """Return a hash of the source of each figure, by the name of its module."""
    digests = {}
    for figure in figures:
        digests[figure.__name__] = _digest(Path(str(figure.__file__)))
    return digests


def _write_stamp(
    folder: Path, source: str, written: Written, figures: Iterable[ModuleType]
) -> list[str]:
    """Write the stamp of some files. Returns a note if that fails, else nothing."""
    digests = {}
    for path in written.files:
        digests[str(path.relative_to(folder))] = _digest(path)
    stamp = {"source": source, "notes": written.notes, "files": digests}
    if figures:
        stamp["figures"] = _digests_of(figures)
    return _write_text(folder / STAMP, json.dumps(stamp))


def _write_text(path: Path, text: str) -> list[str]:
    """Write a text to a file. Returns a note if that fails, else nothing."""
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except StorageError as error:
        return [not_written(path.name, error)]
    return []


def source_of(record: StudyRecord) -> str:
    """Return a hash of a study, the code that draws it and its drawing library."""
    source = hashlib.sha256(version("matplotlib").encode())
    package = Path(__file__).parents[1]
    code = [
        *package.glob("core/*.py"),
        *package.glob("analysis/*.py"),
        *package.glob("report/**/*.*"),
    ]
    for file in sorted(code):
        # The first run of new code writes byte code beside it, which is not of the source.
        if file.parent.name != "__pycache__":
            source.update(file.read_bytes())
    with suppress(OSError, TypeError):  # the source of a notebook cannot be read
        source.update(inspect.getsource(type(record.statistic)).encode())
    # Without what the record has computed so far.
    content = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    source.update(pickle.dumps(content, protocol=5))
    return source.hexdigest()


def _read_stamp(folder: Path) -> dict[str, Any]:
    """Return the stamp of a folder; empty without a stamp, or if it was edited."""
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _unchanged_files(
    folder: Path, source: str, stamp: dict[str, Any], figures: Sequence[ModuleType] | None
) -> Written | None:
    """Return the files that were written of an equal source; None unless all are unchanged.

    Args:
        folder: Where the files are.
        source: The hash of the study and the code.
        stamp: The stamp of the folder.
        figures: The user's figures of the study; None for any.
    """
    try:
        if stamp["source"] != source:
            return None
        if figures is not None and stamp.get("figures", {}) != _digests_of(figures):
            return None
        files = []
        for name, digest in stamp["files"].items():
            file = folder / name
            if _digest(file) != digest:
                return None
            files.append(file)
        return Written(files, stamp["notes"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # no stamp, a missing file, or a stamp that was edited


def _delete_obsolete(folder: Path, stamp: dict[str, Any], files: Collection[Path]) -> None:
    """Delete the files of a former stamp that the study does not have any more.

    A figure may have become too large to be drawn. A file that the user changed stays.

    Args:
        folder: Where the files are.
        stamp: The former stamp.
        files: The files that the study has now.
    """
    former = stamp.get("files")
    if not isinstance(former, dict):
        return
    for name, digest in former.items():
        file = folder / name
        is_inside = folder.resolve() in file.resolve().parents
        if file in files or not is_inside:
            continue
        with suppress(OSError):  # it is deleted, or the folder is read-only
            if _digest(file) == digest:
                file.unlink()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_goals(
    study: Analysis,
    folder: Path,
    only: Collection[str] | None = None,
    figures: Sequence[ModuleType] = (),
) -> Written:
    """Write the files of a study at all its goals.

    Each further goal has a folder below the folder of the study. Without `only` also report.html
    is written, the page of the study at all its goals. Arguments as of `write_all`.
    """
    pictures: list[Picture] = []
    files, notes = write_all(study, folder, only, figures, pictures)
    if only is None:
        try:
            files.append(_write_page(study, folder / PAGE, pictures))
        except Exception as error:  # matplotlib may raise anything
            notes.append(not_written(PAGE, error))
    for further in study.at_each_goal[1:]:
        goal = further.record.goal
        goal_files, goal_notes = write_all(further, goal_folder(folder, goal.value), only, figures)
        files += goal_files
        for note in goal_notes:
            if note not in notes:
                notes.append(f"{goal}: {note}")
    return Written(files, notes)


def write_all(
    study: Analysis,
    folder: Path | str,
    only: Collection[str] | None = None,
    figures: Sequence[ModuleType] = (),
    pictures: list[Picture] | None = None,
) -> Written:
    """Write the tables and figures of a study at one goal into a folder, which is made.

    The tables are `tables_of` and table.txt. Each file is replaced at once.

    Args:
        study: The study, finished or not.
        folder: Where the files go.
        only: Names of figures; these alone are written, and no table.
        figures: Figures of the user, beside those of the package.
        pictures: A list that gets a picture of each drawn figure.
    """
    from lit_dps.report.figures import FIGURES, write_figures  # imports matplotlib

    tables = Written([], [])
    if only is None:
        tables = _write_tables(study, Path(folder))
    files, notes = write_figures([*FIGURES, *figures], [study], folder, only, pictures)
    return Written([*tables.files, *files], [*tables.notes, *notes])


def _write_page(study: Analysis, path: Path, pictures: Sequence[Picture]) -> Path:
    from lit_dps.report.html import page  # imports matplotlib

    with replacing(path) as temporary:
        temporary.write_text(page(study, pictures), encoding="utf-8")
    return path


def tables_of(study: Analysis) -> dict[str, pd.DataFrame]:
    """Return the tables of a study that have a row, by file name.

    Always table.csv (cells), fits.csv (laws) and critical.csv. With a K* answer.csv; with measured
    terms of the theory theory.csv and theory-ratios.csv; with readings readings.csv, the curves of
    all trials and repeats; with repeats repeats.csv and
    median-fits.csv; with delays delay-law.csv and critical-delays.csv; with weights moved towards
    isometry isometry.csv.
    """
    tables = {
        "table.csv": study.table,
        "fits.csv": study.law_table,
        "critical.csv": study.critical_table,
        "answer.csv": study.answer,
    }
    if has_values(study.theory, "delta") or count(study.term_ratios["pairs"]):
        tables["theory.csv"] = study.theory
        tables["theory-ratios.csv"] = study.term_ratios
    if reading_columns(study.record):
        tables["readings.csv"] = study.trial_curves
    if len(study.repeat_table):
        tables["repeats.csv"] = study.repeat_table
        tables["median-fits.csv"] = law_rows(study.median_laws)
    if len(study.delays):
        tables["delay-law.csv"] = study.delays
        tables["critical-delays.csv"] = study.critical_delays
    tables["isometry.csv"] = jacobian_rows(study.record)
    return {name: table for name, table in tables.items() if len(table)}


def _write_tables(study: Analysis, folder: Path) -> Written:
    """Write table.txt and the tables of a study as CSV."""
    notes = _write_text(folder / "table.txt", render(study))
    files = []
    if not notes:
        files.append(folder / "table.txt")
    for name, table in tables_of(study).items():
        try:
            write_csv(table, folder / name)
            files.append(folder / name)
        except StorageError as error:
            notes.append(not_written(name, error))
    return Written(files, notes)


def listing(files: Sequence[Path], notes: Sequence[str], width: int = WIDTH) -> str:
    """Return a list of written files with notes; files that differ in suffix share a line.

    Args:
        files: The files.
        notes: The notes, which are wrapped.
        width: Columns of the terminal.
    """
    kinds: dict[Path, list[str]] = {}
    for path in files:
        kinds.setdefault(path.with_name(path.stem), []).append(path.suffix[1:])
    lines = ["written:"]
    if not files:
        lines = ["nothing written"]
    for stem, suffixes in kinds.items():
        suffix = suffixes[0]
        if len(suffixes) > 1:
            suffix = f"{{{','.join(suffixes)}}}"
        lines.append(f"  {stem}.{suffix}")
    if notes:
        lines.append("")
    for note in notes:
        lines += wrap(f"note: {note}", width)
    return "\n".join(lines) + "\n"
