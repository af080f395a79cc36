"""What pruning leaves of each layer, where a layer is left empty, and what repair did to the
network's Jacobian."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import fmean

import pandas as pd

from lit_dps.analysis.tables import columns_of, frame, three_digits
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import JACOBIAN, RESIDUAL, Series, TrialResult, text_of

Kept = Mapping[str, tuple[int, int]]  # as `TrialResult.kept`
INIT = "pruning.init"
SPECTRUM = ("mean", "spread", "condition")


def kept_of(record: StudyRecord) -> Iterator[tuple[Series, int, Kept]]:
    """Series, point, and what its mask keeps, once for each point.

    The mask is the same at every batch size, and whatever weights are trained under it
    (`pruning.init`), which is left out of the series.
    """
    seen = set()
    for cell in record.cells:
        others = tuple(pair for pair in cell.axes if pair[0] != INIT)
        for result in record.results[cell]:
            key = Series(cell.sparsity, others), result.trial.point
            if result.kept and key not in seen:
                seen.add(key)
                yield *key, result.kept


def layer_rows(kept: Iterable[tuple[Series, int, Kept]]) -> pd.DataFrame:
    """One row a series and layer, in the network's order; biases are left out: where they begin at
    zero all go.

    Columns: sparsity and further axes, layer, total [elements], points, kept (the mean over the
    points), share, low and high (the least and the greatest share of a point), empty (points in
    which nothing of it is kept).
    """
    by_series: dict[Series, list[Kept]] = {}
    for series, _, counts in kept:
        by_series.setdefault(series, []).append(counts)
    rows = []
    for series, points in sorted(by_series.items()):
        for layer in (name for name in points[0] if not is_bias(name)):
            counts = [point[layer][0] for point in points if layer in point]
            total = points[0][layer][1]
            shares = {
                "share": fmean(counts) / total,
                "low": min(counts) / total,
                "high": max(counts) / total,
            }
            empty = sum(n == 0 for n in counts)
            row = {
                "layer": layer,
                "total": total,
                "points": len(counts),
                "kept": fmean(counts),
                **shares,
            }
            rows.append({**columns_of(series), **row, "empty": empty})
    return frame(rows)


def is_bias(name: str) -> bool:
    """Whether a tensor is a bias, as torch calls them."""
    return name.rsplit(".", 1)[-1].lower().startswith("bias")


def collapse_rows(layers: pd.DataFrame) -> pd.DataFrame:
    """One row a way of pruning and sparsity, from `layer_rows`.

    Columns: further axes, sparsity, points, kept (the share of all layers' weights, the mean over
    the points: less than 1 - sparsity where that counts nodes), least (the least share of a layer
    that any point keeps), layer (which), empty (points in which some layer is empty, at least),
    collapses (the first of the sparsities at which a layer of some point is empty; missing where
    none is).
    """
    ways = list(layers.columns[1 : layers.columns.get_loc("layer")])
    rows = []
    for way, part in layers.groupby(ways, sort=False) if ways else [((), layers)]:
        first = part.loc[part["empty"] > 0, "sparsity"].min()
        for sparsity, here in part.groupby("sparsity"):
            least = here.loc[here["low"].idxmin()]
            row = {"sparsity": sparsity, "points": int(here["points"].max())}
            row |= {
                "kept": float(here["kept"].sum() / here["total"].sum()),
                "least": float(least["low"]),
            }
            row |= {"layer": least["layer"], "empty": int(here["empty"].max())}
            rows.append(
                {
                    **dict(zip(ways, way, strict=True)),
                    **row,
                    "collapses": None if pd.isna(first) else first,
                }
            )
    return frame(rows)


def empty_layers(record: StudyRecord) -> list[str]:
    """A line where a layer was pruned whole: its network passes nothing on there but biases."""
    rows = layer_rows(kept_of(record))
    rows = rows[rows["empty"] > 0] if len(rows) else rows
    if not len(rows):
        return []
    names = list(rows.columns[: rows.columns.get_loc("layer")])
    told = []
    for row in rows.to_dict("records"):
        series = " ".join(
            f"{'S' if name == 'sparsity' else name}={text_of(row[name])}" for name in names
        )
        told.append(f"{series}: {row['layer']} at {row['empty']} of {row['points']} points")
    more = f"; {len(told) - 3} more in layers.csv" if len(told) > 3 else ""
    return [f"layers that pruning left empty: {'; '.join(told[:3])}{more}"]


def jacobian_rows(record: StudyRecord) -> pd.DataFrame:
    """One row a trial that was moved towards isometry (`pruning.init`).

    Columns: sparsity and further axes, batch_size [examples], point; distance_before and
    distance_after, the sum over the layers of ||W'W - I||_F; mean, spread (standard deviation over
    all examples) and condition (median over the examples of largest over smallest) of the singular
    values of d outputs / d inputs, each _before and _after, missing where they were not measured.
    """
    rows = []
    for cell in record.cells:
        for result in record.results[cell]:
            if RESIDUAL.format("after") not in result.flags:
                continue
            found = {
                f"distance_{when}": result.flags[RESIDUAL.format(when)]
                for when in ("before", "after")
            }
            for name in SPECTRUM:
                for when in ("before", "after"):
                    found[f"{name}_{when}"] = result.flags.get(JACOBIAN.format(name, when))
            names = {
                **columns_of(cell.series),
                "batch_size": cell.batch_size,
                "point": result.trial.point,
            }
            rows.append(names | found)
    return frame(rows)


def jacobian_notes(record: StudyRecord) -> list[str]:
    """How repair moved the singular values of the Jacobian, by series, means over its trials."""
    told, unknown = [], 0
    for series in record.series:
        trials = [r for cell in record.cells if cell.series == series for r in record.results[cell]]
        moved = [r for r in trials if RESIDUAL.format("after") in r.flags]
        known = [r for r in moved if JACOBIAN.format("mean", "after") in r.flags]
        unknown += len(moved) - len(known)
        if known:
            told.append(f"{series}: {_spectrum(known, 'before')} to {_spectrum(known, 'after')}")
    lines = []
    if told:
        what = (
            "singular values of the Jacobian (mean +- deviation, condition), of the pruned "
            "network to the repaired one"
        )
        lines.append(f"{what}: {'; '.join(told)}")
    if unknown:
        lines.append(
            f"of {unknown} repaired networks the Jacobian was not measured: no vector of at most "
            "100 outputs"
        )
    return lines


def _spectrum(results: list[TrialResult], when: str) -> str:
    mean, spread = (
        fmean(r.flags[JACOBIAN.format(name, when)] for r in results) for name in SPECTRUM[:2]
    )
    conditions = sorted(r.flags[JACOBIAN.format("condition", when)] for r in results)
    return (
        f"{three_digits(mean)} +- {three_digits(spread)} "
        f"({three_digits(conditions[len(conditions) // 2])})"
    )
