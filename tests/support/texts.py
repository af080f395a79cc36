"""What a text for users holds, independent of its wording."""

from __future__ import annotations

import re

from matplotlib.figure import Figure
from matplotlib.legend import Legend

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.text import WIDTH
from lit_dps.report.answer import answer_lines
from lit_dps.report.result_table import result_table
from lit_dps.report.timing_notes import place_of, timing_notes


def answer_text(study: Analysis) -> str:
    """Return the table of results, the sentences of the answer and the notes on its times."""
    head = f"study {study.record.name}: which batch size? {study.record.goal}, on {place_of(study)}"
    lines = [head, "", *result_table(study, WIDTH), "", *answer_lines(study), *timing_notes(study)]
    return "\n".join(lines) + "\n"


def in_one_line(text: str) -> str:
    """Return a text without line breaks and repeated spaces, since texts wrap at the width."""
    return " ".join(text.split())


def numbers_in(text: str) -> list[float]:
    """Return the numbers of a text in their order; digits within names and versions are none."""
    return [float(number) for number in re.findall(r"(?<![\w.=])\d+(?:\.\d+)?(?![\w.]\d)", text)]


def figure_texts(figure: Figure) -> str:
    """Return the texts of a figure: labels, titles, what is written in its panels, legends."""
    lines = []
    for name, text in (("x", figure.get_supxlabel()), ("y", figure.get_supylabel())):
        if text:
            lines.append(f"figure {name}: {_one_line(text)}")
    lines += [f"figure legend: {_legend_text(legend)}" for legend in figure.legends]
    for number, ax in enumerate(figure.axes, 1):
        lines.append(f"panel {number}: {_one_line(ax.get_title())}".rstrip())
        for name, text in (("x", ax.get_xlabel()), ("y", ax.get_ylabel())):
            if text:
                lines.append(f"  {name}: {_one_line(text)}")
        lines += [f"  text: {_one_line(text.get_text())}" for text in ax.texts]
        if ax.get_legend() is not None:
            lines.append(f"  legend: {_legend_text(ax.get_legend())}")
    return "\n".join(lines) + "\n"


def _legend_text(legend: Legend) -> str:
    return "; ".join(_one_line(text.get_text()) for text in legend.get_texts())


def _one_line(text: str) -> str:
    return " ".join(text.split())
