"""Layers after pruning: what each keeps, which are empty, and what repair did to the Jacobian."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, mean
from typing import Any

import pandas as pd

from lit_dps.analysis.tables import columns_before, columns_of, frame, records
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import DENSITY_SUM, JACOBIAN, RESIDUAL, Series, TrialResult, text_of

Kept = Mapping[str, tuple[int, int]]  # as `TrialResult.kept`

# The axis of weights that are trained under a mask. The mask does not depend on it.
INIT = "pruning.init"
# Statistics of the singular values of the Jacobian, by their name in `JACOBIAN`.
SPECTRUM = ("mean", "spread", "condition")


def kept_of(record: StudyRecord) -> Iterator[tuple[Series, int, Kept]]:
    """Yield series, point, and what its mask keeps, once for each point.

    The mask is the same at every batch size and for all weights that are trained under it. So the
    series are without the axis `pruning.init`. Series whose masks change in training are omitted:
    each of their trials keeps something else (`trials_with_changes`).
    """
    changing = trials_with_changes(record)
    seen = set()
    for cell in record.cells:
        series = cell.series.without(INIT)
        for result in record.results[cell]:
            key = series, result.trial.point
            if result.kept and series not in changing and key not in seen:
                seen.add(key)
                yield series, result.trial.point, result.kept


def trials_with_changes(record: StudyRecord) -> dict[Series, list[TrialResult]]:
    """Return the trials of each series in which the mask of a trial changed during training.

    The series are without the axis `pruning.init`. Their trials include those that ended before the
    first change.
    """
    by_series: dict[Series, list[TrialResult]] = {}
    changing = set()
    for cell in record.cells:
        series = cell.series.without(INIT)
        for result in record.results[cell]:
            if result.kept:
                by_series.setdefault(series, []).append(result)
            if DENSITY_SUM in result.flags:
                changing.add(series)
    return {series: trials for series, trials in by_series.items() if series in changing}


def layer_rows(kept: Iterable[tuple[Series, int, Kept]]) -> pd.DataFrame:
    """Return one row a series and layer, in the network's order.

    Biases are skipped: if they begin at zero, all of them are pruned. Columns: sparsity and further
    axes, layer, total [elements] and kept (the means over the samples that have the layer, whose
    networks may differ in size), samples, share (the mean over these samples), low and high (the
    least and the greatest share of a sample), empty (samples that keep nothing of the layer).
    """
    by_series: dict[Series, list[Kept]] = {}
    for series, _, counts in kept:
        by_series.setdefault(series, []).append(counts)
    rows = []
    for series, samples in sorted(by_series.items()):
        by_layer: dict[str, list[tuple[int, int]]] = {}
        for sample in samples:
            for layer, counts in sample.items():
                by_layer.setdefault(layer, []).append(counts)
        for layer, of_layer in by_layer.items():
            if not is_bias(layer):
                rows.append({**columns_of(series), "layer": layer, **_shares(of_layer)})
    return frame(rows)


def _shares(counts: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Return the columns of a layer by the elements that each sample keeps, and their total."""
    shares = [kept / total for kept, total in counts]
    # `mean` is exact. `fmean` of equal shares may be below the least one, by rounding.
    return {
        "total": mean(total for _, total in counts),
        "samples": len(counts),
        "kept": fmean(kept for kept, _ in counts),
        "share": mean(shares),
        "low": min(shares),
        "high": max(shares),
        "empty": shares.count(0),
    }


def is_bias(name: str) -> bool:
    """Return True if a tensor is a bias, by its name in torch."""
    return name.rsplit(".", 1)[-1].lower().startswith("bias")


def collapse_rows(layers: pd.DataFrame) -> pd.DataFrame:
    """Return one row a way of pruning and sparsity, from `layer_rows`.

    Columns: further axes, sparsity, samples, kept (the share of all layers' weights, over all
    samples: less than 1 - sparsity if that counts nodes), least (the least share of a layer
    that any sample keeps), layer (of that share), empty (a lower bound of the samples with empty
    layers), collapses (the first sparsity at which a sample has an empty layer; missing without
    any).
    """
    ways = columns_before(layers, "layer")[1:]
    groups: Any = [((), layers)]
    if ways:
        groups = layers.groupby(ways, sort=False)
    rows = []
    for way, part in groups:
        collapses = part.loc[part["empty"] > 0, "sparsity"].min()
        if pd.isna(collapses):
            collapses = None
        for sparsity, here in part.groupby("sparsity"):
            least = here.loc[here["low"].idxmin()]
            # A layer that some samples do not have counts once for each sample that has it.
            kept = (here["kept"] * here["samples"]).sum()
            total = (here["total"] * here["samples"]).sum()
            rows.append(
                {
                    **dict(zip(ways, way, strict=True)),
                    "sparsity": sparsity,
                    "samples": int(here["samples"].max()),
                    "kept": float(kept / total),
                    "least": float(least["low"]),
                    "layer": least["layer"],
                    "empty": int(here["empty"].max()),
                    "collapses": collapses,
                }
            )
    return frame(rows)


def empty_layers(record: StudyRecord) -> list[str]:
    """Return the layers that are empty after pruning, each with its series and its samples.

    Such a layer outputs only its biases. Masks that change count at the end of their trials.
    """
    table = layer_rows(kept_of(record))
    places = _emptied_by_changes(record)
    if not len(table):
        return places
    names = {name: name for name in columns_before(table, "layer")}
    names["sparsity"] = "S"
    for row in records(table):
        if row["empty"]:
            series = [f"{text}={text_of(row[name])}" for name, text in names.items()]
            samples = f"at {row['empty']} of {row['samples']} samples"
            places.append(f"{' '.join(series)}: {row['layer']} {samples}")
    return places


def _emptied_by_changes(record: StudyRecord) -> list[str]:
    """Return the layers that changing masks emptied, with the number of trials."""
    places = []
    for series, trials in sorted(trials_with_changes(record).items()):
        # Networks may differ in their layers.
        for layer in dict.fromkeys(name for trial in trials for name in trial.kept):
            empty = sum(trial.kept.get(layer, (1, 1))[0] == 0 for trial in trials)
            if empty and not is_bias(layer):
                places.append(f"{series}: {layer} at the end of {empty} of {len(trials)} trials")
    return places


def jacobian_rows(record: StudyRecord) -> pd.DataFrame:
    """Return one row a trial that was moved towards isometry (`pruning.init`).

    Columns: sparsity and further axes, batch_size [examples], point; distance_before and
    distance_after, the sum over the layers of ||W'W - I||_F; mean, spread (standard deviation over
    all examples) and condition (median over the examples of largest over smallest) of the singular
    values of d outputs / d inputs, each _before and _after, missing if they were not measured.
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
