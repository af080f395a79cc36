"""Figures of studies as PNG and PDF, each with its rows as CSV.

A figure is a module with

- NAME, by which it is requested; PAPER, its numbers in Lee et al. 2021; and CAPTION;
- `missing(*studies)`, which returns why there is nothing to draw, in a few words, or None;
- `notes(*studies)`, which returns what a reader should know of the figure, a line each;
- `rows(*studies)`, the table behind it, and `draw(rows, *studies)`; or with several tables or
  files `tables(*studies)`, by name, and `figures(tables, *studies)`, which yields name and figure.

It may also have

- `by_default(*studies)`, which returns whether it is drawn without a request;
- `too_large(*studies)`, which returns why it is drawn on request only, or None; its tables are
  always written.

Numbers are computed in `lit_dps.analysis`; a figure draws them, and the CSV beside it has them.
`write.FIGURES` lists the figures of one study, `write.COMPARISONS` the figures of several. A figure
of a user is named by its module: in `study.figures`, in `--only` and in `Study.plot`.
"""

from lit_dps.report.figures.page_pictures import Picture
from lit_dps.report.figures.style import STYLE
from lit_dps.report.figures.write import (
    COMPARISONS,
    FIGURES,
    drawn,
    of_others,
    write_comparison,
    write_figures,
)
