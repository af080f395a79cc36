"""Pictures of figures for the report page, as small as possible."""

from __future__ import annotations

import re
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import matplotlib
import PIL.Image
from matplotlib.figure import Figure

from lit_dps.report.figures.style import LAID_OUT

MAX_SVG_BYTES = 150_000  # a picture of more shapes is a PNG
PNG_DPI = 150
PIXELS_PER_INCH = 120  # on a wide screen, where text of 7 points is else too small
# Text stays text, in a font of the reader. Equal figures have equal identifiers.
_SVG_STYLE = {
    **LAID_OUT,
    "svg.fonttype": "none",
    "svg.hashsalt": "lit_dps",
    "font.sans-serif": ["DejaVu Sans", "Arial"],
}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_SHAPE = re.compile(r"<(?:path|use|text)\b[^>]*>")
_FURTHER_DIGITS = re.compile(r"(\.\d\d)\d+")
_COORDINATES = re.compile(r' (?:d|x|y)="[^"]*"')


class Picture(NamedTuple):
    """A figure as a file.

    Attributes:
        name: The name of the figure.
        caption: What it shows.
        kind: "svg" or "png".
        data: The content of the file.
        width, height: CSS pixels.
    """

    name: str
    caption: str
    kind: str
    data: bytes
    width: int
    height: int


def picture_of(figure: ModuleType, name: str, drawing: Figure) -> Picture:
    """Return a picture of a figure whose layout is final: SVG, or PNG if it has many shapes.

    Args:
        figure: The module of the figure.
        name: The name of the drawing.
        drawing: The drawing.
    """
    kind, data = "svg", svg_of(drawing)
    if len(data) > MAX_SVG_BYTES:
        kind, data = "png", _png_of(drawing)
    text = getattr(figure, "CAPTION", name)
    if name != figure.NAME:
        text += f": {name}"
    width, height = drawing.get_size_inches() * PIXELS_PER_INCH
    return Picture(name, text, kind, data, round(width), round(height))


def svg_of(drawing: Figure) -> bytes:
    """Return a figure as SVG, with coordinates of two decimals."""
    file = BytesIO()
    with matplotlib.rc_context(_SVG_STYLE):
        drawing.savefig(file, format="svg", metadata=_NO_METADATA)
    return _SHAPE.sub(_with_short_coordinates, file.getvalue().decode()).encode()


def _with_short_coordinates(shape: re.Match[str]) -> str:
    """Return an element whose coordinates have two decimals, a hundredth of a point."""
    return _COORDINATES.sub(lambda each: _FURTHER_DIGITS.sub(r"\1", each[0]), shape[0])


def _png_of(drawing: Figure) -> bytes:
    """Return a figure as PNG with at most 256 colours."""
    file = BytesIO()
    with matplotlib.rc_context(LAID_OUT):
        drawing.savefig(file, format="png", dpi=PNG_DPI)
    target = BytesIO()
    copy_small(file, target)
    return target.getvalue()


def copy_small(file: Path | BytesIO, target: Path | BytesIO) -> None:
    """Copy a PNG with at most 256 colours, which takes a third of the space."""
    with PIL.Image.open(file) as picture:
        small = picture.convert("RGB").quantize(256, dither=PIL.Image.Dither.NONE)
    small.save(target, format="png", optimize=True)
