"""Writes the tables and figures that studies have data for, and says in a line what the others lack."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from lit_dps.analysis.figures.entry import Entry, Subject, of_one
from lit_dps.analysis.figures.lipschitz import LIPSCHITZ
from lit_dps.analysis.figures.logs import LOGS
from lit_dps.analysis.figures.metaparameters import METAPARAMETERS
from lit_dps.analysis.figures.optimizers import OPTIMIZERS
from lit_dps.analysis.figures.ratios import RATIOS
from lit_dps.analysis.figures.scaling import SCALING
from lit_dps.analysis.figures.style import STYLE
from lit_dps.analysis.report import fit_rows, render, table_rows, write_csv
from lit_dps.analysis.scaling import FittedStudy, Scaling, scaling_of
from lit_dps.analysis.theory import term_ratio_rows, theory_rows
from lit_dps.files import replacing
from lit_dps.record import StudyRecord

FIGURES: tuple[Entry[FittedStudy], ...] = (SCALING, METAPARAMETERS, LIPSCHITZ, LOGS, of_one(RATIOS))  # of one study
COMPARISONS: tuple[Entry[Sequence[FittedStudy]], ...] = (OPTIMIZERS, RATIOS)  # of several


def write_all(
    record: StudyRecord,
    folder: Path | str,
    scalings: Mapping[float, Scaling] | None = None,
    only: Collection[str] | None = None,
) -> tuple[list[Path], list[str]]:
    """Writes the tables and each of `FIGURES`, as .csv, .png and .pdf, into a folder.

    The tables are table.txt, table.csv and fits.csv; where terms of the theory were measured also theory.csv, those of
    the K* trials, and theory-ratios.csv, sparse over dense.

    Works on unfinished studies too. Each file is replaced in one go.

    Args:
        record: The study.
        folder: Made if it is not there.
        scalings: The study's scaling laws if they are known already.
        only: Names of figures: these alone are written, and no table.

    Returns:
        The files' paths, and notes: what the study lacks for the figures left out, and what to know of the others.
    """
    folder = Path(folder)
    study = FittedStudy(record, scaling_of(record) if scalings is None else scalings)
    tables = _write_tables(study, folder) if only is None else []
    files, notes = _write_figures(FIGURES, study, folder, only)
    return [*tables, *files], notes


def write_comparison(
    studies: Sequence[FittedStudy], folder: Path | str, only: Collection[str] | None = None
) -> tuple[list[Path], list[str]]:
    """Writes each of `COMPARISONS` for some studies; arguments and returned values as of `write_all`."""
    return _write_figures(COMPARISONS, studies, Path(folder), only)


def _write_tables(study: FittedStudy, folder: Path) -> list[Path]:
    with replacing(folder / "table.txt") as temporary:
        temporary.write_text(render(*study), encoding="utf-8")
    write_csv(table_rows(study.record), folder / "table.csv")
    tables = {"table.csv": table_rows(study.record), "fits.csv": fit_rows(study.scalings)}
    theory, ratios = theory_rows(*study), term_ratio_rows(*study)
    if any(row["delta"] is not None for row in theory) or any(row["pairs"] for row in ratios):
        tables |= {"theory.csv": theory, "theory-ratios.csv": ratios}
    for name, rows in tables.items():
        if rows:  # no ratios at one sparsity
            write_csv(rows, folder / name)
    return [folder / "table.txt", *(folder / name for name, rows in tables.items() if rows)]


def _write_figures(
    entries: Iterable[Entry[Subject]], subject: Subject, folder: Path, only: Collection[str] | None
) -> tuple[list[Path], list[str]]:
    files: list[Path] = []
    notes: list[str] = []
    missing: dict[str, list[str]] = {}
    for entry in entries:
        if only is not None and entry.name not in only:
            continue
        if (reason := entry.missing(subject)) is not None:
            missing.setdefault(reason, []).append(entry.name)
            continue
        tables = entry.tables(subject)
        for name, rows in tables.items():
            write_csv(rows, folder / f"{name}.csv")
            files.append(folder / f"{name}.csv")
        for name, figure in entry.draw(subject, tables):
            files += _save(figure, folder, name)
        notes += entry.notes(subject)
    return files, [*(f"{reason}: no {' or '.join(names)} figure" for reason, names in missing.items()), *notes]


def _save(figure: Figure, folder: Path, name: str) -> list[Path]:
    png, pdf = folder / f"{name}.png", folder / f"{name}.pdf"
    # Ticks are made as they are drawn, so the style must hold here too. Without its date a PDF is always the same.
    with matplotlib.rc_context(STYLE):
        with replacing(png) as temporary:
            figure.savefig(temporary, format="png", dpi=200)
        figure.set_layout_engine("none")  # it is laid out, and that takes longest
        with replacing(pdf) as temporary:
            figure.savefig(temporary, format="pdf", metadata={"CreationDate": None})
    return [png, pdf]
