"""Writes the figures of studies with their tables, and notes on what the others lack."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

import lit_dps.report.figures.adam_rules as adam_rules
import lit_dps.report.figures.budgets as budgets
import lit_dps.report.figures.delay as delay
import lit_dps.report.figures.density as density
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
import lit_dps.report.figures.ramps as ramps
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
from lit_dps.report.figures.page_pictures import Picture, picture_of
from lit_dps.report.figures.page_size import current_page_size
from lit_dps.report.figures.style import LAID_OUT, caption, without_math

# Figures of one study, in the order of the report.
FIGURES = (
    *(scaling, time_to_goal, metaparameters, lipschitz, noise, logs, ratios, delay, local),
    *(budgets, quality, rates, adam_rules, ramps, draws, pruners, density, layers, terms),
)
COMPARISONS = (optimizers, ratios)  # figures of several studies
NAMES = {figure.NAME for figure in (*FIGURES, *COMPARISONS)}
# Tables of a study that are not named as a figure (`publish.tables_of`, and second tables).
TABLES = {
    *("table", "fits", "critical", "answer", "theory", "theory-ratios", "readings", "repeats"),
    *("median-fits", "delay-law", "critical-delays", "isometry"),
    *(layers.COLLAPSE, lipschitz.MEANS, rates.PRICES, terms.CORRELATIONS),
}
REQUIRED = ("NAME", "missing", "notes")  # parts of a user's figure
# Arguments of `savefig`. Without its date an equal figure has an equal file.
SETTINGS: dict[str, dict[str, Any]] = {
    "png": {"dpi": 200},
    "pdf": {"metadata": {"CreationDate": None}},
    "svg": {"metadata": {"Date": None}},
}


def write_comparison(
    studies: Sequence[Analysis], folder: Path | str, only: Collection[str] | None = None
) -> tuple[list[Path], list[str]]:
    """Write each of `COMPARISONS` of some studies; arguments and result as of `write_figures`."""
    return write_figures(COMPARISONS, studies, folder, only)


def write_figures(
    figures: Iterable[ModuleType],
    studies: Sequence[Analysis],
    folder: Path | str,
    only: Collection[str] | None = None,
    pictures: list[Picture] | None = None,
) -> tuple[list[Path], list[str]]:
    """Write figures of studies, finished or not, with their tables as .csv.

    `page_size` sets their size and formats.

    Args:
        figures: Modules as the docstring of the package describes them.
        studies: The studies.
        folder: Where the files go; it is made.
        only: Names of figures, and of users' modules (`of_others`); these alone are written, also
            if they are too large or not drawn by default.
        pictures: A list that gets a picture of each drawn figure, for the report page.

    Returns:
        The paths of the files, and notes: what the studies lack for figures that are not drawn, and
        what to know of the others.
    """
    figures = list(figures)
    if only is not None:
        figures = [figure for figure in figures if figure.NAME in only]
        figures += map(of_others, set(only) - NAMES)
    files: list[Path] = []
    notes: list[str] = []
    not_drawn: dict[str, list[str]] = {}  # names of figures, by the reason
    for figure in with_progress("figures drawn", figures):
        if not _is_wanted(figure, studies, only):
            continue
        reason = figure.missing(*studies)
        if reason is not None:
            not_drawn.setdefault(reason, []).append(figure.NAME)
            continue
        # A figure that fails must not prevent the others.
        try:
            too_large = None
            if only is None and hasattr(figure, "too_large"):
                too_large = figure.too_large(*studies)
            if too_large is not None:
                not_drawn.setdefault(too_large, []).append(figure.NAME)
            is_drawn = too_large is None
            files += _write_figure(figure, studies, Path(folder), is_drawn, pictures)
            notes += figure.notes(*studies)
        except Exception as error:
            notes.append(not_written(f"figure {figure.NAME}", error))
    reasons = []
    for reason, names in not_drawn.items():
        reasons.append(f"{reason}: no {' or '.join(names)} figure")
    return files, [*reasons, *notes]


def _is_wanted(
    figure: ModuleType, studies: Sequence[Analysis], only: Collection[str] | None
) -> bool:
    """Return False for a figure that has to be requested."""
    if only is None and hasattr(figure, "by_default"):
        return figure.by_default(*studies)
    return True


def _write_figure(
    figure: ModuleType,
    studies: Sequence[Analysis],
    folder: Path,
    is_drawn: bool,
    pictures: list[Picture] | None,
) -> list[Path]:
    """Write the tables of a figure and, if it is drawn, the figure; return the files' paths."""
    files = []
    tables = _tables(figure, studies)
    for name, table in tables.items():
        path = folder / f"{name}.csv"
        write_csv(table, path)
        files.append(path)
    if is_drawn:
        for name, drawing in _drawings(figure, tables, studies):
            caption(drawing, studies)
            files += save(drawing, folder, name)
            if pictures is not None:
                pictures.append(picture_of(figure, name, drawing))
    return files


def of_others(name: str, key: str = "--only") -> ModuleType:
    """Return the figure in a module of a user.

    Args:
        name: The name of the module.
        key: The key or option that names it.

    Raises:
        ConfigError: if the module cannot be imported, is not a figure, has AXIS of an earlier
            version, or has the name of a figure or table of the package.
    """
    try:
        module = import_module(name)
    except ImportError as error:
        allowed = f"any of {', '.join(sorted(NAMES))}, or a module: {error}"
        hint = None
        parent = name.rpartition(".")[0]
        if parent in sys.modules:
            hint = f"A figure is a module, not a class: name {parent}."
        raise ConfigError(key, name, allowed, hint) from error
    for part in REQUIRED:
        if not hasattr(module, part):
            allowed = f"a figure, which has NAME, missing and notes; it has no {part}"
            raise ConfigError(key, name, allowed)
    if isinstance(getattr(module, "AXIS", None), str) and not hasattr(module, "by_default"):
        # Without AXIS, the figure is drawn of studies whose grid lacks this key, too.
        allowed = "a figure without AXIS, which is no longer read"
        hint = f"Define by_default(*studies), which returns whether their axes have {module.AXIS}."
        raise ConfigError(key, name, allowed, hint)
    is_pair = module.NAME.startswith(f"{metaparameters.NAME}-")
    if module.NAME in NAMES | TABLES or is_pair:
        allowed = f"a figure whose NAME is not {module.NAME!r}, which the package writes itself"
        raise ConfigError(key, name, allowed)
    return module


def drawn(figure: ModuleType, *studies: Analysis) -> Figure:
    """Return a figure of some studies, or the first one if it has several files."""
    _, drawing = next(_drawings(figure, _tables(figure, studies), studies))
    without_math(drawing)
    return drawing


def _tables(figure: ModuleType, studies: Sequence[Analysis]) -> Mapping[str, pd.DataFrame]:
    """Return the tables of a figure, by name."""
    if hasattr(figure, "tables"):
        return figure.tables(*studies)
    return {figure.NAME: figure.rows(*studies)}


def _drawings(
    figure: ModuleType, tables: Mapping[str, pd.DataFrame], studies: Sequence[Analysis]
) -> Iterator[tuple[str, Figure]]:
    """Yield the drawings of a figure, with the name of each."""
    if hasattr(figure, "figures"):
        yield from figure.figures(tables, *studies)
    else:
        yield figure.NAME, figure.draw(tables[figure.NAME], *studies)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure in each format of `page_size` as NAME.FORMAT; return the paths.

    The folder is made.
    """
    files = []
    # Ticks are made while they are drawn, so the style must hold here too.
    with matplotlib.rc_context(LAID_OUT):
        for kind in current_page_size().formats:
            path = folder / f"{name}.{kind}"
            with replacing(path) as temporary:
                figure.savefig(temporary, format=kind, **SETTINGS[kind])
            files.append(path)
    return files
