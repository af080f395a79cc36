"""K* against batch size for several update rules (Lee et al. 2021, Figure 2), as rows."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lit_dps.analysis.figures.entry import Entry
from lit_dps.analysis.figures.scaling import (
    bound_handles,
    bound_notes,
    common_batch_size,
    curve_rows,
    draw_band,
    draw_curve,
    draw_perfect,
    values_of,
)
from lit_dps.analysis.figures.style import BATCH_SIZE, K_STAR, STYLE, batch_size_axis, curve_style, log_values_axis
from lit_dps.analysis.scaling import FittedStudy
from lit_dps.analysis.summary import setting
from lit_dps.analysis.text import Row
from lit_dps.record import StudyRecord

# What studies must have in common for their K* to tell of the update rule alone.
IN_COMMON = {
    "data set": "data.class_path",
    "module": "model.class_path",
    "network": "model.init_args.network.class_path",
    "pruning": "pruning.method",
}


def optimizer_rows(studies: Sequence[FittedStudy]) -> list[Row]:
    """The curves of several studies, by sparsity, study, then batch size.

    Sparsities are those at which at least two of the studies have a K*, studies there those that have one. Columns:
    sparsity, study, label (see `study_labels`), and those of `curve_rows`, normalised at the smallest batch size that
    has a K* in each study (`common_batch_size`).
    """
    labels = study_labels([study.record for study in studies])
    rows: list[Row] = []
    for sparsity in _shared(studies):
        there = [study for study in studies if _measured(study, sparsity)]
        common = common_batch_size([study.scalings[sparsity] for study in there])
        for study in there:
            name = study.record.name
            row: Row = {"sparsity": sparsity, "study": name, "label": labels[name]}
            curve = curve_rows(study.scalings[sparsity], study.record.batch_sizes, common)
            rows += [row | point for point in curve]
    return rows


def study_labels(records: Sequence[StudyRecord]) -> dict[str, str]:
    """What each study is called in a legend: by its update rule where that tells all of them apart, else by its name.

    A learning rate that is not constant is told with the rule: "momentum, linear decay".
    """
    rules = {}
    for record in records:
        rule, schedule = (setting(record.config, f"model.init_args.{key}") for key in ("optimizer", "schedule"))
        decay = "" if schedule in (None, "constant") else f", {schedule} decay"
        rules[record.name] = f"{rule}{decay}" if isinstance(rule, str) else record.name
    return rules if len(set(rules.values())) == len(rules) else {name: name for name in rules}


def optimizers_missing(studies: Sequence[FittedStudy]) -> str | None:
    """Why there are no update rules to compare, if so."""
    shared = _shared(studies)
    if not shared:
        return "no sparsity at which two of the studies have a K*"
    sizes = {b for study in studies for s in shared if s in study.scalings for b in study.scalings[s].k_star}
    return "complete trials at one batch size only" if len(sizes) == 1 else None


def optimizers_notes(studies: Sequence[FittedStudy]) -> list[str]:
    """What, besides the update rule, the studies do not have in common, and how upper bounds are drawn."""
    records = [study.record for study in studies]
    told = {
        "goal error": [f"{record.goal.error:g}" for record in records],
        "number of trials a cell": [f"{record.trials}" for record in records],
    }
    for what, key in IN_COMMON.items():
        told[what] = [str(setting(record.config, key)).rsplit(".", 1)[-1] for record in records]
    differ = [
        f"the studies differ in their {what}: {', '.join(dict.fromkeys(values))}"
        for what, values in told.items()
        if len(set(values)) > 1
    ]
    shared = _shared(studies)
    return differ + bound_notes(study.scalings[s] for study in studies for s in shared if s in study.scalings)


def _shared(studies: Sequence[FittedStudy]) -> list[float]:
    """Sparsities at which at least two of the studies have a K*, ascending."""
    every = sorted({sparsity for study in studies for sparsity in study.record.sparsities})
    return [sparsity for sparsity in every if sum(_measured(study, sparsity) for study in studies) > 1]


def _measured(study: FittedStudy, sparsity: float) -> bool:
    return sparsity in study.scalings and bool(study.scalings[sparsity].k_star)


@matplotlib.rc_context(STYLE)
def draw_optimizers(rows: Sequence[Row]) -> Figure:
    """K* of the studies with fit and band above, normalised below; a column per sparsity.

    Args:
        rows: From `figure_data.optimizer_rows`.
    """
    sparsities = list(dict.fromkeys(row["sparsity"] for row in rows))
    labels = list(dict.fromkeys(row["label"] for row in rows))
    sizes = sorted({row["batch_size"] for row in rows if isinstance(row["batch_size"], int)})
    figure = Figure(figsize=(max(2.1 * len(sparsities), 3.3) + 0.3, 4.6))
    panels = figure.subplots(2, len(sparsities), sharex=True, sharey="row", squeeze=False)
    for sparsity, (steps, normalised) in zip(sparsities, panels.T, strict=True):
        part = [row for row in rows if row["sparsity"] == sparsity]
        curves = [[row for row in part if row["label"] == label] for label in labels]
        for i, curve in enumerate(curves):
            draw_band(steps, curve, i)
            draw_curve(steps, curve, i)
            draw_curve(normalised, curve, i, "normalised_")
        draw_perfect(normalised, next(filter(None, curves)), "normalised_", "perfect scaling")
        steps.set_title(f"sparsity {sparsity:g}")
        normalised.set_xlabel(BATCH_SIZE)
        normalised.set_ylabel(f"K* / K*(B = {part[0]['normalised_by'] or '?'})")
    batch_size_axis(panels[0, 0], sizes)
    log_values_axis(panels[0, 0], values_of(rows, "k_star"))
    log_values_axis(panels[1, 0], values_of(rows, "normalised_k_star"))
    panels[0, 0].set_ylabel(K_STAR)
    if bounds := bound_handles(rows):
        panels[0, -1].legend(handles=bounds, loc="upper right", handlelength=1.5)
    panels[1, -1].legend(loc="upper right", handlelength=2)
    handles = [Line2D([], [], label=label, **curve_style(i)) for i, label in enumerate(labels)]
    fit = sum(len(label) + 6 for label in labels) * 0.06 < figure.get_figwidth()  # inches of a character
    figure.legend(handles=handles, loc="outside upper center", ncols=len(labels) if fit else 1, handlelength=1.5)
    return figure


OPTIMIZERS = Entry(
    name="optimizers",
    paper="2",
    tables=lambda studies: {"optimizers": optimizer_rows(studies)},
    draw=lambda studies, tables: [("optimizers", draw_optimizers(tables["optimizers"]))],
    missing=optimizers_missing,
    notes=optimizers_notes,
)
