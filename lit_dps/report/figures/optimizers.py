"""K* against batch size for several update rules (Lee et al. 2021, Figure 2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import lit_dps.report.figures.scaling as scaling
import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import columns_of, rows_of, title
from lit_dps.core.record import StudyRecord, setting
from lit_dps.core.trial import Series, text_of

NAME, PAPER = "optimizers", "2"
CAPTION = "K* against batch size by update rule (Figure 2)"
# What studies must have in common for their K* to tell of the update rule alone.
IN_COMMON = {
    "data set": "data.class_path",
    "module": "model.class_path",
    "network": "model.init_args.network.class_path",
    "pruning": "pruning.method",
}


def rows(*studies: Analysis) -> pd.DataFrame:
    """The curves of several studies, by series, study, then batch size.

    Series are those in which at least two of the studies have a K*, studies there those that have
    one. Columns: those of the series, study, label (see `study_labels`), and those of `curve_rows`,
    normalised at the smallest batch size that has a K* in each study (`common_batch_size`).
    """
    labels, found = study_labels([study.record for study in studies]), []
    for series in _shared(studies):
        there = [study for study in studies if _has_k_star(study, series)]
        common = scaling.common_batch_size([study.scalings[series] for study in there])
        for study in there:
            name = study.record.name
            curve = scaling.curve_rows(study.scalings[series], study.record.batch_sizes, common)
            found.append(
                pd.DataFrame({**columns_of(series), "study": name, "label": labels[name], **curve})
            )
    return pd.concat(found, ignore_index=True)


def study_labels(records: Sequence[StudyRecord]) -> dict[str, str]:
    """What each study is called in a legend: by its update rule, with its name where others have
    the same rule.

    A learning rate that is not constant is told with the rule: "momentum, linear decay". A study
    whose rule its configuration does not say is called by its name.
    """
    rules = {}
    for record in records:
        rule, schedule = (
            setting(record.config, f"model.init_args.{key}") for key in ("optimizer", "schedule")
        )
        decay = "" if schedule in (None, "constant") else f", {schedule} decay"
        rule = rule.get("class_path") if isinstance(rule, Mapping) else rule
        rules[record.name] = f"{text_of(rule)}{decay}" if isinstance(rule, str) else record.name
    often = Counter(rules.values())
    return {name: rule if often[rule] == 1 else f"{rule} ({name})" for name, rule in rules.items()}


def missing(*studies: Analysis) -> str | None:
    """Why there are no update rules to compare, if so."""
    shared = _shared(studies)
    if not shared:
        return "no sparsity at which two of the studies have a K*"
    sizes = {
        b
        for study in studies
        for s in shared
        if s in study.scalings
        for b in study.scalings[s].k_star
    }
    return "K* at one batch size only" if len(sizes) == 1 else None


def notes(*studies: Analysis) -> list[str]:
    """What, besides the update rule, the studies do not have in common, and how upper bounds are
    drawn."""
    records = [study.record for study in studies]
    told = {
        "goal error": [str(record.goal).removeprefix("goal error ") for record in records],
        "number of trials per cell": [f"{record.trials}" for record in records],
    }
    for what, key in IN_COMMON.items():
        told[what] = [str(setting(record.config, key)).rsplit(".", 1)[-1] for record in records]
    differ = [
        f"The studies differ in their {what}: {', '.join(dict.fromkeys(values))}"
        for what, values in told.items()
        if len(set(values)) > 1
    ]
    shared = _shared(studies)
    return differ + scaling.bound_notes(
        study.scalings[s] for study in studies for s in shared if s in study.scalings
    )


def _shared(studies: Sequence[Analysis]) -> list[Series]:
    """Series in which at least two of the studies have a K*, sorted."""
    every = sorted({series for study in studies for series in study.scalings})
    return [series for series in every if sum(_has_k_star(study, series) for study in studies) > 1]


def _has_k_star(study: Analysis, series: Series) -> bool:
    return series in study.scalings and bool(study.scalings[series].k_star)


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, *studies: Analysis) -> Figure:
    """K* of the studies with fit and band above, normalised below; a column per series."""
    shared, labels = _shared(studies), list(rows["label"].unique())
    figure = Figure(figsize=(max(2.1 * len(shared), 3.3) + 0.3, 4.6))
    panels = figure.subplots(2, len(shared), sharex=True, sharey="row", squeeze=False)
    for series, (steps, normalised) in zip(shared, panels.T, strict=True):
        part = rows_of(series, rows)
        lines = [part[part["label"] == label] for label in labels]
        for i, curve in enumerate(lines):
            scaling.draw_band(steps, curve, i)
            scaling.draw_curve(steps, curve, i)
            scaling.draw_curve(normalised, curve, i, "normalised_")
        scaling.draw_perfect(normalised, next(filter(len, lines)), "normalised_")
        steps.set_title(title(series))
        normalised.set_xlabel(look.BATCH_SIZE)
        scaling.label_normalised(normalised, part)
    look.batch_size_axis(panels[0, 0], scaling.grid_sizes(rows))
    look.log_values_axis(panels[0, 0], rows["k_star"].dropna())
    look.log_values_axis(panels[1, 0], rows["normalised_k_star"].dropna())
    panels[0, 0].set_ylabel(look.K_STAR)
    look.legend_above(
        figure,
        [Line2D([], [], label=label, **look.curve_style(i)) for i, label in enumerate(labels)],
    )
    every = (
        study.scalings[series] for study in studies for series in shared if series in study.scalings
    )
    handles = [each for each in scaling.line_handles(every) if each.get_label() != "B_crit"]
    handles += scaling.bound_handles(rows)
    columns = min(len(handles), int(figure.get_figwidth() / 1.2))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, columnspacing=1.2)
    return figure
