"""The size of a figure on its page: of a report, of a paper or of a slide, and its file formats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from matplotlib.figure import Figure

from lit_dps.core.errors import ConfigError

REPORT = "report"
PAPER = "paper"
SLIDES = "slides"
STYLES = (REPORT, PAPER, SLIDES)
FORMATS = ("png", "pdf", "svg")
# Widths of a column and of both columns in two-column journals and conferences, inches.
COLUMN_INCHES = 3.25
TEXT_INCHES = 6.75
WIDEST_IN_COLUMN = 4.95  # inches that a figure has in the report; a wider one has several panels
SLIDE_INCHES = 5.0  # text of 8 points on a slide of 13.3 inches is then as large as 21 points
WIDEST_ON_SLIDE = 6.5  # inches in the report; the panels of a wider one would be too small
MIN_INCHES = 1.5
MAX_INCHES = 40.0


@dataclass(frozen=True)
class PageSize:
    """How large figures are, and in which formats they are written.

    Fonts have the same size in points in each style: 8 for labels, 7 for ticks and legends.

    Args:
        style: "report" has each figure at its own width, with a caption that names the study.
            "paper" has the width of one column (3.25 inches), or with panels side by side of the
            page (6.75 inches), and no caption. "slides" has a width of 5 inches and no caption, so
            that an enlarged figure has large text; figures of many panels stay wider.
        width: The width in inches, in place of the width of the style. The height follows.
        formats: Of "png", "pdf" and "svg".

    Raises:
        ConfigError: naming `--style`, `--width` or `--format`.
    """

    style: str = REPORT
    width: float | None = None
    formats: tuple[str, ...] = ("png", "pdf")

    def __post_init__(self):
        if self.style not in STYLES:
            raise ConfigError("--style", self.style, f"one of {', '.join(STYLES)}")
        if self.width is not None and not MIN_INCHES <= self.width <= MAX_INCHES:
            raise ConfigError("--width", self.width, f"{MIN_INCHES:g} to {MAX_INCHES:g} inches")
        for name in self.formats or ("",):
            if name not in FORMATS:
                raise ConfigError("--format", name, f"any of {', '.join(FORMATS)}")

    @property
    def has_caption(self) -> bool:
        """Whether the name of the study, the workload and the goal are below each figure."""
        return self.style == REPORT

    def size(self, width: float, height: float) -> tuple[float, float]:
        """Return the size of a figure that has this size in the report, all in inches."""
        target = self.width
        if target is None and self.style == PAPER:
            target = COLUMN_INCHES if width <= WIDEST_IN_COLUMN else TEXT_INCHES
        if target is None and self.style == SLIDES and width <= WIDEST_ON_SLIDE:
            target = SLIDE_INCHES
        if target is None:
            return width, height
        return target, height * target / width


_IN_REPORT = PageSize()
_current: ContextVar[PageSize] = ContextVar("page_size", default=_IN_REPORT)


@contextmanager
def page_size(size: PageSize) -> Iterator[None]:
    """Give figures that are drawn in the block this size."""
    token = _current.set(size)
    try:
        yield
    finally:
        _current.reset(token)


def current_page_size() -> PageSize:
    """Return the size that figures have now."""
    return _current.get()


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure.

    Args:
        width, height: In the report, in inches.
    """
    return Figure(figsize=current_page_size().size(width, height))
