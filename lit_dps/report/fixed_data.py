"""What larger batches cost at a fixed number of examples, for `lit-dps analyze --examples`."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.fixed_data import FixedData, fixed_data_losses
from lit_dps.analysis.law import Law
from lit_dps.analysis.summary import CellSummary
from lit_dps.core.errors import ConfigError
from lit_dps.core.text import number_text
from lit_dps.core.trial import Series

OPTION = "--examples"


def fixed_data_text(study: Analysis, examples: float) -> str:
    """Return the loss that each batch size costs with a fixed number of examples, as lines.

    The curve of a series is that of the K* trial at its smallest batch size that trained on so many
    examples.

    Args:
        study: A study that stores a loss of the validation split.
        examples: The number of examples.

    Raises:
        ConfigError: If no series has a loss curve of so many examples.
    """
    metric = _loss_metric(study)
    lines = []
    for series, law in study.laws.items():
        cells = study.cells_by_series[series]
        lines += _lines_of_series(series, law, cells, metric, examples)
    return "\n".join(lines)


def _loss_metric(study: Analysis) -> str:
    """Return the stored loss of the validation split, by which batch sizes are compared."""
    for summary in study.cells:
        if summary.best is None:
            continue
        for name in study.record.metrics:
            if "loss" in name and name in summary.best.curve:
                return name
    allowed = "a study whose goal is a loss, or whose study.metrics contains val_loss"
    raise ConfigError(OPTION, study.record.name, allowed)


def _lines_of_series(
    series: Series, law: Law, cells: Sequence[CellSummary], metric: str, examples: float
) -> list[str]:
    """Return the answer of a series, then a line for each of its batch sizes."""
    title = f"fixed data, {series}:"
    if law.b_crit_interval is None or not law.is_b_crit_known:
        return [f"{title} no answer, because B_crit is not identifiable"]
    longest = 0.0
    for summary in sorted(cells, key=lambda each: each.cell.batch_size):
        curve = _loss_curve(summary, metric)
        if len(curve):
            longest = max(longest, max(curve["examples"].tolist()))
        if longest < examples:
            continue
        batch_sizes = [each.cell.batch_size for each in cells]
        found = fixed_data_losses(
            curve, summary.cell.batch_size, law.b_crit_interval, examples, batch_sizes
        )
        return [f"{title} {found.describe()}", *_rows(found, metric)]
    allowed = f"at most {number_text(longest, 4)}, the examples of the longest K* trial"
    raise ConfigError(OPTION, examples, allowed)


def _loss_curve(summary: CellSummary, metric: str) -> pd.DataFrame:
    """Return examples and loss at each check of the K* trial; empty without one."""
    if summary.best is None:
        return pd.DataFrame({"examples": [], "loss": []})
    curve = summary.best.curve
    steps = pd.Series(curve["step"], dtype=float)
    return pd.DataFrame({"examples": steps * summary.cell.batch_size, "loss": curve[metric]})


def _rows(found: FixedData, metric: str) -> list[str]:
    """Return a line for each batch size."""
    lines = []
    for row in found.table.to_dict("records"):
        start = f"  B = {row['batch_size']:g}: {number_text(row['steps'], 3)} steps"
        if row["known"] == "refused":
            lines.append(f"{start}, refused: the curve is too short")
            continue
        numbers = [f"{100 * row[key]:+.2g}" for key in ("cost", "low", "high")]
        text = f"{start}, {metric} {numbers[0]} % [{numbers[1]}, {numbers[2]}]"
        if row["known"] == "extrapolated":
            text += ", extrapolated"
        lines.append(text)
    return lines
