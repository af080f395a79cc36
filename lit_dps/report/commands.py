"""The command that retrains the trial of K* at a study's fastest batch size."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import records
from lit_dps.core.record import cell_text
from lit_dps.core.trial import Cell


def fastest(analysis: Analysis) -> Cell | None:
    """Return the cell with the least time to the goal; None without any K*.

    Without step times it is the cell of the least K*.
    """
    cells = [summary.cell for summary in analysis.cells if summary.k_star is not None]
    ranked = []
    for cell, row in zip(cells, records(analysis.answer), strict=True):
        seconds = math.inf if row["seconds"] is None else row["seconds"]
        ranked.append((seconds, row["k_star"], cell))
    return min(ranked)[2] if ranked else None


def again_command(analysis: Analysis, storage: Sequence[str] = ()) -> str | None:
    """Return the command that retrains the best trial of the fastest cell; None without any K*.

    Args:
        analysis: The study.
        storage: Options that name its storage, if that is not the default one.
    """
    cell = fastest(analysis)
    if cell is None:
        return None
    command = ["lit-dps", "fit", "--of", analysis.record.name, "--cell", cell_text(cell), *storage]
    return shlex.join([*command, "--checkpoint", "best.ckpt"])
