"""Writes the figures that studies have data for, with their tables, and says in a line what the
others lack."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

import lit_dps.report.figures.budgets as budgets
import lit_dps.report.figures.delay as delay
import lit_dps.report.figures.draws as draws
import lit_dps.report.figures.layers as layers
import lit_dps.report.figures.lipschitz as lipschitz
import lit_dps.report.figures.local as local
import lit_dps.report.figures.logs as logs
import lit_dps.report.figures.metaparameters as metaparameters
import lit_dps.report.figures.noise as noise
import lit_dps.report.figures.optimizers as optimizers
import lit_dps.report.figures.pruners as pruners
import lit_dps.report.figures.quality as quality
import lit_dps.report.figures.rates as rates
import lit_dps.report.figures.ratios as ratios
import lit_dps.report.figures.scaling as scaling
import lit_dps.report.figures.terms as terms
import lit_dps.report.figures.time_to_goal as time_to_goal
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import write_csv
from lit_dps.core.atomic_write import not_written, replacing
from lit_dps.core.errors import ConfigError
from lit_dps.core.progress_line import with_progress
from lit_dps.report.figures.style import LAID_OUT, caption, without_math

# of one study
FIGURES = (
    *(scaling, time_to_goal, metaparameters, lipschitz, noise, logs, ratios, delay, local),
    *(budgets, quality, rates, draws, pruners, layers, terms),
)
COMPARISONS = (optimizers, ratios)  # of several
NAMES = {figure.NAME for figure in (*FIGURES, *COMPARISONS)}


def write_comparison(
    studies: Sequence[Analysis], folder: Path | str, only: Collection[str] | None = None
) -> tuple[list[Path], list[str]]:
    """Writes each of `COMPARISONS` of some studies, as `write_figures` does."""
    return write_figures(COMPARISONS, studies, folder, only)


def write_figures(
    figures: Iterable[ModuleType],
    studies: Sequence[Analysis],
    folder: Path | str,
    only: Collection[str] | None = None,
) -> tuple[list[Path], list[str]]:
    """Writes figures of studies, finished or not, as .csv, .png and .pdf into a folder, which is
    made.

    A figure of too many panels (`too_large`) is drawn only with `only`; its tables are always
    written. With `only`, names of figures, these alone are written, and those of modules of others
    that it names (`of_others`).

    Returns:
        The files' paths, and notes: what the studies lack for the figures left out, and what to
        know of the others.
    """
    files: list[Path] = []
    notes: list[str] = []
    missing: dict[str, list[str]] = {}
    if only is not None:
        figures = [
            *(figure for figure in figures if figure.NAME in only),
            *map(of_others, set(only) - NAMES),
        ]
    axes = {None, *(key for study in studies for key in study.record.axes)}
    for figure in with_progress("figures drawn", list(figures)):
        if getattr(figure, "AXIS", None) not in axes:
            continue
        if only is None and hasattr(figure, "by_default") and not figure.by_default(*studies):
            continue
        if (reason := figure.missing(*studies)) is not None:
            missing.setdefault(reason, []).append(figure.NAME)
            continue
        # One figure that fails costs neither the others nor the table.
        try:
            too_large = None
            if only is None and hasattr(figure, "too_large"):
                too_large = figure.too_large(*studies)
            if too_large is not None:
                missing.setdefault(too_large, []).append(figure.NAME)
            files += _write_figure(figure, studies, Path(folder), is_drawn=too_large is None)
            notes += figure.notes(*studies)
        except Exception as error:
            notes.append(not_written(f"figure {figure.NAME}", error))
    return files, [
        *(f"{reason}: no {' or '.join(names)} figure" for reason, names in missing.items()),
        *notes,
    ]


def _write_figure(
    figure: ModuleType, studies: Sequence[Analysis], folder: Path, is_drawn: bool = True
) -> list[Path]:
    """Write the tables of a figure and, unless it is too large, the figure; return the files'
    paths."""
    files = []
    tables = _tables(figure, studies)
    for name, table in tables.items():
        files.append(folder / f"{name}.csv")
        write_csv(table, files[-1])
    if not is_drawn:
        return files
    for name, drawing in _drawings(figure, tables, studies):
        caption(drawing, studies)
        files += save(drawing, folder, name)
    return files


def of_others(name: str) -> ModuleType:
    """The figure that a module of somebody else's is. Raises ConfigError if it is none."""
    try:
        module = import_module(name)
    except ImportError as error:
        raise ConfigError(
            "--only", name, f"any of {', '.join(sorted(NAMES))}, or a module: {error}"
        ) from error
    if lacking := [part for part in ("NAME", "missing", "notes") if not hasattr(module, part)]:
        raise ConfigError(
            "--only", name, f"a figure, which has NAME, missing and notes; it has no {lacking[0]}"
        )
    return module


def drawn(figure: ModuleType, *studies: Analysis) -> Figure:
    """A figure, or the first one of its files."""
    found = next(iter(_drawings(figure, _tables(figure, studies), studies)))[1]
    without_math(found)
    return found


def _tables(figure: ModuleType, studies: Sequence[Analysis]) -> Mapping[str, pd.DataFrame]:
    return (
        figure.tables(*studies)
        if hasattr(figure, "tables")
        else {figure.NAME: figure.rows(*studies)}
    )


def _drawings(
    figure: ModuleType, tables: Mapping[str, pd.DataFrame], studies: Sequence[Analysis]
) -> Iterator[tuple[str, Figure]]:
    if hasattr(figure, "figures"):
        yield from figure.figures(tables, *studies)
    else:
        yield figure.NAME, figure.draw(tables[figure.NAME], *studies)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Writes a figure as NAME.png and NAME.pdf into a folder, which is made; returns the files'
    paths."""
    png, pdf = folder / f"{name}.png", folder / f"{name}.pdf"
    # Ticks are made as they are drawn, so the style must hold here too. Without its date a PDF is
    # always the same.
    with matplotlib.rc_context(LAID_OUT):
        with replacing(png) as temporary:
            figure.savefig(temporary, format="png", dpi=200)
        with replacing(pdf) as temporary:
            figure.savefig(temporary, format="pdf", metadata={"CreationDate": None})
    return [png, pdf]
