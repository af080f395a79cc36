"""Placeholders for the pictures of figures: layout and drawing take a quarter of a small study's
time.

Tables, files' names and errors of writing stay. Tests that are about pictures have the mark
`pictures`.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import PIL.Image
from matplotlib.figure import Figure

from lit_dps.core.atomic_write import replacing
from lit_dps.report.figures import Picture, write

KEY = "LIT_DPS_TEST_PICTURES"  # without it in its environment a process draws
draw = write.save
lay_out = write.caption
picture_of = write.picture_of


def use_placeholders() -> None:
    """From here on, while the environment has `KEY`, pictures are a pixel or a line."""
    write.save = _save
    write.caption = _caption
    write.picture_of = _picture_of


def _caption(figure: Figure, *args) -> None:
    if KEY not in os.environ:
        lay_out(figure, *args)


def _picture_of(figure: ModuleType, name: str, drawing: Figure) -> Picture:
    if KEY not in os.environ:
        return picture_of(figure, name, drawing)
    return Picture(name, figure.NAME, "png", b"a placeholder", 1, 1)


def _save(figure: Figure, folder: Path, name: str) -> list[Path]:
    if KEY not in os.environ:
        return draw(figure, folder, name)
    png, pdf = folder / f"{name}.png", folder / f"{name}.pdf"
    with replacing(png) as temporary:
        PIL.Image.new("RGB", (1, 1)).save(temporary, format="PNG")
    with replacing(pdf) as temporary:
        temporary.write_text(f"a placeholder for {pdf.name}\n")
    return [png, pdf]
