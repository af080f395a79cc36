"""The laws of a study as a table, and medians over seeds beside the law of K*."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from lit_dps.analysis.intervals import interval_columns
from lit_dps.analysis.law import Law
from lit_dps.analysis.tables import columns_of, frame
from lit_dps.core.trial import Series


def medians_outside(law: Law, medians: Law, check_interval: int) -> dict[int, float]:
    """Return median over law, by batch size, of the medians outside the law's 95 % band.

    Empty without a band. A median is exact up to a check interval: it leaves the band if this whole
    interval does. Batch sizes where one of the two is a bound are left out.
    """
    outside = {}
    for batch_size, median in medians.resolved.items():
        sizes = np.array([float(batch_size)])
        band = law.band(sizes)
        if law.fit is None or band is None or batch_size not in law.resolved:
            continue
        low, high = band
        if median < low[0] or median - check_interval > high[0]:
            outside[batch_size] = float(median / law.fit.steps(sizes)[0])
    return outside


def law_rows(laws: Mapping[Series, Law]) -> pd.DataFrame:
    """Return one row a series: its law, 95 % limits and a verdict.

    Columns: sparsity and further axes, batch_sizes (the number of those that the law is fitted to),
    c1 [examples], c2 [steps] and b_crit [examples], each with its limits (_low and _high),
    identifiable, verdict.
    """
    rows = []
    for series, law in sorted(laws.items()):
        row: dict[str, object] = {**columns_of(series), "batch_sizes": len(law.resolved)}
        c1, c2, critical = None, None, None
        if law.fit is not None:
            c1, c2 = law.fit.c1, law.fit.c2
            critical = law.fit.critical_batch_size
        row |= interval_columns("c1", c1, law.c1)
        row |= interval_columns("c2", c2, law.c2)
        row |= interval_columns("b_crit", critical, law.critical)
        row["identifiable"] = law.identifiable
        row["verdict"] = law.describe()
        rows.append(row)
    return frame(rows)
