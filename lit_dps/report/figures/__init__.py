"""Draws studies: every figure of the paper as PNG and PDF, each with its rows as CSV beside it.

A figure is a module with

- NAME, by which it is asked for; PAPER, its numbers in Lee et al. 2021; and CAPTION;
- `missing(*studies)`, why there is nothing to draw, in a few words, or None; `notes(*studies)`,
  what a reader should know of it where it is drawn, a line each;
- `rows(*studies)`, the table behind it, and `draw(rows, *studies)`;
- `by_default(*studies)`, whether it is drawn where no figure is asked for; where there is no such
  function, always;
- AXIS, the key of an axis of the grid without which it is left out;
- where it has several tables or files, `tables(*studies)` and `figures(tables, *studies)` by their
  names.

and one line in `write.FIGURES` (of one study) or `write.COMPARISONS` (of several). Somebody else's
goes by the name of its module.
"""

from lit_dps.report.figures.style import STYLE
from lit_dps.report.figures.write import (
    COMPARISONS,
    FIGURES,
    drawn,
    of_others,
    write_comparison,
    write_figures,
)
