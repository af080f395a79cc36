"""Notes on what pruning did to the networks of a study: masks, empty layers, repair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

import lit_dps.core.trial as flags
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.layers import empty_layers
from lit_dps.core.text import counted
from lit_dps.core.trial import Series
from lit_dps.report.notes import (
    LISTED,
    Level,
    Note,
    Values,
    count_trials,
    finished_trials,
    first_names,
    percent,
)
from lit_dps.report.trial_notes import with_flag

UNMASKED = (
    "{dense:.0f} of {trained:.0f} weights trained at step {step:.0f} have no mask: train them from "
    "the first step, or name them in pruning.exclude."
)
UNMASKED_DETAIL = (
    "They joined the training after pruning and stay dense, so the network is less sparse than S."
)


def kept_without_score(study: Analysis) -> Iterator[Values]:
    """Yield the weights that were kept although their pruning score is 0, by series."""
    unscored = with_flag(study, flags.UNSCORED)
    counts = []
    for series, group in groupby(unscored, lambda result: result.trial.cell.series):
        most = max(group, key=lambda result: result.flags[flags.UNSCORED]).flags
        counts.append(f"{series}: up to {most[flags.UNSCORED]:.0f} of {most[flags.KEPT]:.0f}")
    if counts:
        yield {"counts": ", ".join(counts)}


def inexact_sparsity(study: Analysis) -> Iterator[Values]:
    """Yield the shares of weights that methods keep if these are not exactly 1 - sparsity."""
    for unit, shares in sorted(kept_shares(study).items()):
        ranges = []
        for series, values in sorted(shares.items()):
            ranges.append(f"{series}: {percent(min(values))} to {percent(max(values))}")
        meaning = f"Sparsity counts {unit.removeprefix(flags.BY).replace('_', ' ')}, not weights"
        if unit == flags.BY_WEIGHTS:
            meaning = "The pruning method keeps 1 - S of the weights only approximately"
        yield {"meaning": meaning, "shares": "; ".join(ranges)}


def kept_shares(study: Analysis) -> dict[str, dict[Series, list[float]]]:
    """Return the shares of weights that trials keep, by what their sparsity counts and series."""
    shares: dict[str, dict[Series, list[float]]] = {}
    for result in finished_trials(study):
        kept = 0
        total = 0
        for kept_of_layer, total_of_layer in result.kept.values():
            kept += kept_of_layer
            total += total_of_layer
        for flag in result.flags:
            if flag.startswith(flags.BY):
                of_series = shares.setdefault(flag, {})
                of_series.setdefault(result.trial.cell.series, []).append(kept / total)
    return shares


def layers_without_weights(study: Analysis) -> Iterator[Values]:
    """Yield the layers of which pruning kept no weight."""
    places = empty_layers(study.record)
    if not places:
        return
    listed = "; ".join(first_names(places))
    if len(places) > LISTED:
        listed += " in layers.csv"
    yield {"places": listed}


def few_prunable_weights(study: Analysis) -> Iterator[Values]:
    """Yield the part of the trained weights that can be pruned, if it is small."""
    few = with_flag(study, flags.TRAINED)
    if not few:
        return
    least = min(few, key=lambda result: result.flags[flags.PRUNABLE] / result.flags[flags.TRAINED])
    prunable = least.flags[flags.PRUNABLE]
    trained = least.flags[flags.TRAINED]
    yield {
        "prunable": prunable,
        "trained": trained,
        "share": percent(prunable / trained),
        "names": ", ".join(first_names(list(least.kept))),
    }


def weights_without_mask(study: Analysis) -> Iterator[Values]:
    """Yield the weights that joined the training after pruning."""
    joined = with_flag(study, flags.IN_NO_MASK)
    if joined:
        most = max(
            joined,
            key=lambda result: result.flags[flags.IN_NO_MASK] / result.flags[flags.TRAINED_THEN],
        )
        yield {
            "cell": most.trial.cell,
            "trials": count_trials(joined),
            **_unmasked_values(most.flags),
        }


def unmasked_note(values: Mapping[str, float]) -> str:
    """Return the sentence about trained weights in no mask; empty if the mask covers all.

    Args:
        values: As `TrialResult.flags`.
    """
    if not values.get(flags.IN_NO_MASK):
        return ""
    return f"{UNMASKED} {UNMASKED_DETAIL}".format(**_unmasked_values(values))


def _unmasked_values(values: Mapping[str, float]) -> Values:
    """Return the values of the sentence `UNMASKED`."""
    return {
        "dense": values[flags.IN_NO_MASK],
        "trained": values[flags.TRAINED_THEN],
        "step": values[flags.JOINED_AT],
    }


def masks_without_change(study: Analysis) -> Iterator[Values]:
    """Yield the trials that met the goal before the first change of their mask, by series."""
    met: dict[Series, int] = {}
    unchanged: dict[Series, int] = {}
    intervals = set()
    for result in with_flag(study, flags.CHANGE_EVERY):
        if result.steps is None:
            continue
        series = result.trial.cell.series
        met[series] = met.get(series, 0) + 1
        every = int(result.flags[flags.CHANGE_EVERY])
        if result.steps < every:
            unchanged[series] = unchanged.get(series, 0) + 1
            intervals.add(every)
    counts = []
    for series, count in sorted(unchanged.items()):
        counts.append(f"{series}: {count} of {counted(met[series], 'trial')}")
    if counts:
        every = " or ".join(map(str, sorted(intervals)))
        yield {"counts": "; ".join(counts), "every": every}


def pruned_copies(study: Analysis) -> Iterator[Values]:
    """Yield the weights in copies of the network that were pruned with it."""
    weights = 0.0
    for result in with_flag(study, flags.COPIES):
        weights = max(weights, result.flags[flags.COPIES])
    if weights:
        yield {"weights": weights}


PRUNING = (
    Note(
        kept_without_score,
        "Some kept weights have pruning score 0 ({counts}): lower the sparsity, or use another "
        "pruner.",
        "They were kept by their position in the network, not by the pruner.",
        Level.WEAK,
    ),
    Note(
        inexact_sparsity,
        "{meaning}: compare networks by the share of weights kept.",
        "Share of weights kept: {shares}.",
        Level.WEAK,
    ),
    Note(
        layers_without_weights,
        "Pruning emptied layers: {places}; lower the sparsity.",
        level=Level.WRONG,
    ),
    Note(
        few_prunable_weights,
        "Only {prunable:.0f} of {trained:.0f} trained weights ({share}) can be pruned: read S as "
        "the sparsity of these alone.",
        "They are in {names}.",
        Level.WEAK,
    ),
    Note(
        weights_without_mask,
        "{cell}: " + UNMASKED,
        UNMASKED_DETAIL + " ({trials} affected)",
        Level.WRONG,
    ),
    Note(
        masks_without_change,
        "No mask changed before the goal ({counts}): lower pruning.options.every.",
        "The mask changes first after {every} steps. K* of these trials belongs to the mask of the "
        "start, not to the method.",
        Level.WRONG,
    ),
    Note(
        pruned_copies,
        "{weights:.0f} weights in copies of the pruned network were pruned too: name the copies in "
        "pruning.exclude to keep them dense.",
        "A momentum teacher is such a copy.",
        Level.WEAK,
    ),
)
