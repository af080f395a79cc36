"""The command that trains the trial of K* again, for a study's fastest batch size."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import records
from lit_dps.core.record import cell_text
from lit_dps.core.trial import Cell


def fastest(analysis: Analysis) -> Cell | None:
    """The cell of the least time to the goal; where no trial tells a time, of the least K*; None
    without any K*."""
    known = [summary.cell for summary in analysis.cells if summary.k_star is not None]
    rows = zip(known, records(analysis.answer), strict=True)
    least = min(
        (
            (math.inf if row["seconds"] is None else row["seconds"], row["k_star"], cell)
            for cell, row in rows
        ),
        default=None,
    )
    return None if least is None else least[2]


def again_command(analysis: Analysis, storage: Sequence[str] = ()) -> str | None:
    """The command for the fastest cell; None without any K*.

    Args:
        analysis: The study.
        storage: Options that say where it is stored, if not at the default place.
    """
    if (cell := fastest(analysis)) is None:
        return None
    command = ["lit-dps", "fit", "--of", analysis.record.name, "--cell", cell_text(cell), *storage]
    return shlex.join([*command, "--checkpoint", "best.ckpt"])
