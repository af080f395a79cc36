"""Layers after pruning: what each keeps, which are empty, and what repair did to the Jacobian."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import pandas as pd

from lit_dps.analysis.tables import columns_of, frame, three_digits
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import JACOBIAN, RESIDUAL, Series, TrialResult, text_of

Kept = Mapping[str, tuple[int, int]]  # as `TrialResult.kept`
INIT = "pruning.init"
SPECTRUM = ("mean", "spread", "condition")
MAX_LISTED = 3  # empty layers that a note names


def kept_of(record: StudyRecord) -> Iterator[tuple[Series, int, Kept]]:
    """Yield series, point, and what its mask keeps, once for each point.

    The mask is the same at every batch size, and whatever weights are trained under it
    (`pruning.init`), which is left out of the series.
    """
    seen = set()
    for cell in record.cells:
        axes = tuple(pair for pair in cell.axes if pair[0] != INIT)
        series = Series(cell.sparsity, axes)
        for result in record.results[cell]:
            key = series, result.trial.point
            if result.kept and key not in seen:
                seen.add(key)
                yield series, result.trial.point, result.kept


def layer_rows(kept: Iterable[tuple[Series, int, Kept]]) -> pd.DataFrame:
    """Return one row a series and layer, in the network's order.

    Biases are left out: where they begin at zero all are pruned. Columns: sparsity and further
    axes, layer, total [elements], points, kept (the mean over the points), share, low and high (the
    least and the greatest share of a point), empty (points in which nothing of it is kept).
    """
    by_series: dict[Series, list[Kept]] = {}
    for series, _, counts in kept:
        by_series.setdefault(series, []).append(counts)
    rows = []
    for series, points in sorted(by_series.items()):
        for layer, (_, total) in points[0].items():
            if is_bias(layer):
                continue
            counts = [point[layer][0] for point in points if layer in point]
            rows.append(
                {
                    **columns_of(series),
                    "layer": layer,
                    "total": total,
                    "points": len(counts),
                    "kept": fmean(counts),
                    "share": fmean(counts) / total,
                    "low": min(counts) / total,
                    "high": max(counts) / total,
                    "empty": counts.count(0),
                }
            )
    return frame(rows)


def is_bias(name: str) -> bool:
    """Return True if a tensor is a bias, by its name in torch."""
    return name.rsplit(".", 1)[-1].lower().startswith("bias")


def collapse_rows(layers: pd.DataFrame) -> pd.DataFrame:
    """Return one row a way of pruning and sparsity, from `layer_rows`.

    Columns: further axes, sparsity, points, kept (the share of all layers' weights, the mean over
    the points: less than 1 - sparsity where that counts nodes), least (the least share of a layer
    that any point keeps), layer (which), empty (points in which some layer is empty, at least),
    collapses (the first of the sparsities at which a layer of some point is empty; missing where
    none is).
    """
    ways = _names_of_series(layers)[1:]
    groups: Any = [((), layers)]
    if ways:
        groups = layers.groupby(ways, sort=False)
    rows = []
    for way, part in groups:
        first = part.loc[part["empty"] > 0, "sparsity"].min()
        for sparsity, here in part.groupby("sparsity"):
            least = here.loc[here["low"].idxmin()]
            rows.append(
                {
                    **dict(zip(ways, way, strict=True)),
                    "sparsity": sparsity,
                    "points": int(here["points"].max()),
                    "kept": float(here["kept"].sum() / here["total"].sum()),
                    "least": float(least["low"]),
                    "layer": least["layer"],
                    "empty": int(here["empty"].max()),
                    "collapses": None if pd.isna(first) else first,
                }
            )
    return frame(rows)


def _names_of_series(layers: pd.DataFrame) -> list[str]:
    """Return the columns of `layer_rows` that name a series."""
    columns = list(layers.columns)
    return columns[: columns.index("layer")]


def empty_layers(record: StudyRecord) -> list[str]:
    """Return a note if pruning left layers empty: they pass nothing on but biases."""
    table = layer_rows(kept_of(record))
    if not len(table):
        return []
    names = _names_of_series(table)
    places = []
    for row in table.to_dict("records"):
        if not row["empty"]:
            continue
        series = [f"{'S' if name == 'sparsity' else name}={text_of(row[name])}" for name in names]
        points = f"at {row['empty']} of {row['points']} points"
        places.append(f"{' '.join(series)}: {row['layer']} {points}")
    if not places:
        return []
    text = f"layers that pruning left empty: {'; '.join(places[:MAX_LISTED])}"
    if len(places) > MAX_LISTED:
        text += f"; {len(places) - MAX_LISTED} more in layers.csv"
    return [text]


def jacobian_rows(record: StudyRecord) -> pd.DataFrame:
    """Return one row a trial that was moved towards isometry (`pruning.init`).

    Columns: sparsity and further axes, batch_size [examples], point; distance_before and
    distance_after, the sum over the layers of ||W'W - I||_F; mean, spread (standard deviation over
    all examples) and condition (median over the examples of largest over smallest) of the singular
    values of d outputs / d inputs, each _before and _after, missing where they were not measured.
    """
    rows = []
    for cell in record.cells:
        for result in record.results[cell]:
            if not _is_repaired(result):
                continue
            row = {
                **columns_of(cell.series),
                "batch_size": cell.batch_size,
                "point": result.trial.point,
            }
            for when in ("before", "after"):
                row[f"distance_{when}"] = result.flags[RESIDUAL.format(when)]
            for name in SPECTRUM:
                for when in ("before", "after"):
                    row[f"{name}_{when}"] = result.flags.get(JACOBIAN.format(name, when))
            rows.append(row)
    return frame(rows)


def _is_repaired(result: TrialResult) -> bool:
    """Return True if a trial's weights were moved towards isometry."""
    return RESIDUAL.format("after") in result.flags


def jacobian_notes(record: StudyRecord) -> list[str]:
    """Return how repair moved the singular values of the Jacobian, means over each series."""
    parts = []
    unmeasured = 0
    for series in record.series:
        measured = []
        for cell in record.cells:
            if cell.series != series:
                continue
            for result in filter(_is_repaired, record.results[cell]):
                if JACOBIAN.format("mean", "after") in result.flags:
                    measured.append(result)
                else:
                    unmeasured += 1
        if measured:
            before, after = _spectrum(measured, "before"), _spectrum(measured, "after")
            parts.append(f"{series}: {before} to {after}")
    lines = []
    if parts:
        lines.append(
            "singular values of the Jacobian (mean +- deviation, condition), of the pruned "
            f"network to the repaired one: {'; '.join(parts)}"
        )
    if unmeasured:
        lines.append(
            f"of {unmeasured} repaired networks the Jacobian was not measured: no vector of at "
            "most 100 outputs"
        )
    return lines


def _spectrum(results: Sequence[TrialResult], when: str) -> str:
    """Return mean, deviation and condition of the singular values of some trials, in words."""
    mean = fmean(r.flags[JACOBIAN.format("mean", when)] for r in results)
    spread = fmean(r.flags[JACOBIAN.format("spread", when)] for r in results)
    conditions = sorted(r.flags[JACOBIAN.format("condition", when)] for r in results)
    median = conditions[len(conditions) // 2]
    return f"{three_digits(mean)} +- {three_digits(spread)} ({three_digits(median)})"
