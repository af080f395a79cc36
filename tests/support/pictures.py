"""Placeholders for the pictures of figures: layout and drawing take a quarter of a small study's
time.

Tables, files' names and errors of writing stay. Tests that are about pictures have the mark
`pictures`. Its arguments name the figures that are drawn; without arguments all are drawn.

Figures of the package are not even made in the process of the tests. The commands that it starts
make them, so that each meets the studies of real trials.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pandas as pd
import PIL.Image
from matplotlib.figure import Figure

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.atomic_write import replacing
from lit_dps.report.figures import Picture, write

# The names of the figures that are drawn. Without it in its environment a process draws all.
KEY = "LIT_DPS_TEST_PICTURES"
NONE = "-"  # no figure has this name
draw = write.save
lay_out = write.caption
picture_of = write.picture_of
write_figure = write._write_figure
drawings_of = write._drawings


def use_placeholders(are_made: bool) -> None:
    """From here on, while the environment has `KEY`, pictures are a pixel or a line.

    Args:
        are_made: Whether figures of the package are made before their pictures are replaced.
    """
    write.save = _save
    write.caption = _caption
    write.picture_of = _picture_of
    if not are_made:
        write._write_figure = _write_figure


def _write_figure(*args) -> list[Path]:
    write._drawings = _drawings  # `write.drawn` has its own call, and makes all
    try:
        return write_figure(*args)
    finally:
        write._drawings = drawings_of


def _drawings(
    figure: ModuleType, tables: Mapping[str, pd.DataFrame], studies: Sequence[Analysis]
) -> Iterator[tuple[str, Figure]]:
    """Yield an empty figure in place of one of the package that has one file."""
    has_one = figure in (*write.FIGURES, *write.COMPARISONS) and not hasattr(figure, "figures")
    if has_one and not is_drawn(figure.NAME):
        yield figure.NAME, Figure()
    else:
        yield from drawings_of(figure, tables, studies)


def is_drawn(name: str) -> bool:
    """Return True if this process draws a figure."""
    return KEY not in os.environ or name in os.environ[KEY].split(",")


def _caption(figure: Figure, *args) -> None:
    """Lay a figure out if all are drawn; of others `_save` knows the name."""
    if KEY not in os.environ:
        lay_out(figure, *args)
    else:
        figure.caption_arguments = args


def _picture_of(figure: ModuleType, name: str, drawing: Figure) -> Picture:
    if is_drawn(name):
        return picture_of(figure, name, drawing)
    return Picture(name, figure.NAME, "png", b"a placeholder", 1, 1)


def _save(figure: Figure, folder: Path, name: str) -> list[Path]:
    if is_drawn(name):
        if KEY in os.environ:
            lay_out(figure, *figure.caption_arguments)
        return draw(figure, folder, name)
    png, pdf = folder / f"{name}.png", folder / f"{name}.pdf"
    with replacing(png) as temporary:
        PIL.Image.new("RGB", (1, 1)).save(temporary, format="PNG")
    with replacing(pdf) as temporary:
        temporary.write_text(f"a placeholder for {pdf.name}\n")
    return [png, pdf]
