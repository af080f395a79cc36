"""K* against batch size for several update rules (Lee et al. 2021, Figure 2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import matplotlib
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure

import lit_dps.report.figures.scaling as scaling
import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.law import Law
from lit_dps.analysis.law_tables import common_batch_size, law_curve
from lit_dps.analysis.tables import columns_of, k_star_axis, rows_of, title, where
from lit_dps.core.record import StudyRecord, setting
from lit_dps.core.trial import Series, text_of
from lit_dps.report.figures.page_size import new_figure

NAME, PAPER = "optimizers", "2"
CAPTION = "K* against batch size by update rule (Figure 2)"
ONE_UNIT = "studies of one unit of K* (goal.unit)"
# Settings that studies must have in common, so that their K* compare update rules alone.
IN_COMMON = {
    "data set": "data.class_path",
    "module": "model.class_path",
    "network": "model.init_args.network.class_path",
    "pruning": "pruning.method",
}


def rows(*studies: Analysis) -> pd.DataFrame:
    """Return the curves of several studies, by series, study, then batch size.

    Series are those in which at least two of the studies have a K*, with the studies that have one.
    Columns: the names of the series, study, label (`study_labels`), and the columns of
    `law_tables.law_curve`, normalised at the smallest batch size that has a K* in each study.
    """
    labels = study_labels([study.record for study in studies])
    parts = []
    for series in _shared_series(studies):
        laws = {}
        for study in studies:
            if series in study.laws and study.laws[series].k_star:
                laws[study] = study.laws[series]
        common = common_batch_size(list(laws.values()))
        for study, law in laws.items():
            name = study.record.name
            curve = law_curve(law, study.record.batch_sizes, common)
            names = {**columns_of(series), "study": name, "label": labels[name]}
            parts.append(pd.DataFrame({**names, **curve}))
    return pd.concat(parts, ignore_index=True)


def study_labels(records: Sequence[StudyRecord]) -> dict[str, str]:
    """Return the label of each study, by name: its update rule, such as "momentum, linear decay".

    Studies with the same rule also have their name. A study whose configuration does not name the
    rule has its name alone.
    """
    rules = {record.name: _update_rule(record) for record in records}
    counts = Counter(rules.values())
    labels = {}
    for name, rule in rules.items():
        labels[name] = rule
        if counts[rule] > 1:
            labels[name] = f"{rule} ({name})"
    return labels


def _update_rule(record: StudyRecord) -> str:
    """Return the update rule of a study with its schedule, or the study's name."""
    rule = setting(record.config, "model.init_args.optimizer")
    if isinstance(rule, Mapping):
        rule = rule.get("class_path")
    if not isinstance(rule, str):
        return record.name
    schedule = setting(record.config, "model.init_args.schedule")
    if schedule in (None, "constant"):
        return text_of(rule)
    return f"{text_of(rule)}, {schedule} decay"


def missing(*studies: Analysis) -> str | None:
    """Return why there are no update rules to compare; None if there are."""
    if len({study.record.statistic.name for study in studies}) > 1:
        return "studies of one K* (study.statistic)"
    if len({study.record.goal.unit for study in studies}) > 1:
        return ONE_UNIT
    shared = _shared_series(studies)
    if not shared:
        return "no sparsity at which two of the studies have a K*"
    sizes = set()
    for curve in _curves(studies, shared):
        sizes.update(curve.k_star)
    if len(sizes) == 1:
        return "K* at one batch size only"
    return None


def notes(*studies: Analysis) -> list[str]:
    """Return what differs between the studies beside the update rule, and how bounds are drawn."""
    values_by_name: dict[str, dict[str, None]] = {}  # in order, without duplicates
    for study in studies:
        for name, value in _settings_in_common(study.record).items():
            values_by_name.setdefault(name, {})[value] = None
    lines = []
    for name, values in values_by_name.items():
        if len(values) > 1:
            lines.append(f"The studies differ in their {name}: {', '.join(values)}")
    return lines + scaling.bound_notes(_curves(studies, _shared_series(studies)))


def _settings_in_common(record: StudyRecord) -> dict[str, str]:
    """Return the settings that compared studies should have in common, by name."""
    settings = {
        "goal error": str(record.goal).removeprefix("goal error "),
        "number of trials per cell": str(record.trials),
    }
    for name, key in IN_COMMON.items():
        settings[name] = str(setting(record.config, key)).rpartition(".")[2]
    return settings


def _shared_series(studies: Sequence[Analysis]) -> list[Series]:
    """Return the series in which at least two of the studies have a K*, sorted."""
    counts: Counter[Series] = Counter()
    for study in studies:
        for series, curve in study.laws.items():
            counts[series] += bool(curve.k_star)
    return sorted(series for series, count in counts.items() if count > 1)


def _curves(studies: Sequence[Analysis], shared: Sequence[Series]) -> list[Law]:
    """Return the curves of studies in some series."""
    curves = []
    for study in studies:
        for series in shared:
            if series in study.laws:
                curves.append(study.laws[series])
    return curves


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, *studies: Analysis) -> Figure:
    """Return K* of the studies with fit and band above, normalised below; a column per series."""
    shared = _shared_series(studies)
    labels = list(rows["label"].unique())
    figure = new_figure(max(2.1 * len(shared), 3.3) + 0.3, 4.6)
    panels = figure.subplots(2, len(shared), sharex=True, sharey="row", squeeze=False)
    for series, (steps, normalised) in zip(shared, panels.T, strict=True):
        part = rows_of(series, rows)
        for i, label in enumerate(labels):
            curve = where(part, label=label)
            scaling.draw_band(steps, curve, i)
            scaling.draw_curve(steps, curve, i)
            scaling.draw_curve(normalised, curve, i, "normalised_")
        # Normalised curves share one line of perfect scaling.
        first = where(part, label=part["label"].iloc[0])
        scaling.draw_perfect(normalised, first, "normalised_")
        steps.set_title(title(series))
        scaling.label_normalised(normalised, part)
    for normalised in panels[1, 1:]:
        normalised.set_ylabel("")  # the panels of a line share their axis
    for normalised in panels[1]:
        normalised.set_xlabel(look.in_two_lines(look.BATCH_SIZE))
    look.batch_size_axis(panels[0, 0], scaling.grid_sizes(rows))
    look.log_values_axis(panels[0, 0], rows["k_star"].dropna())
    look.log_values_axis(panels[1, 0], rows["normalised_k_star"].dropna())
    record = studies[0].record
    label = k_star_axis(record.statistic, record.goal.cost_unit)
    panels[0, 0].set_ylabel(look.in_two_lines(label))
    look.legend_above(figure, look.curve_handles(labels))
    _draw_line_legend(figure, rows, _curves(studies, shared))
    return figure


def _draw_line_legend(figure: Figure, rows: pd.DataFrame, curves: Sequence[Law]) -> None:
    """Draw a legend of the kinds of lines below the panels."""
    handles: list[Artist] = []
    for handle in scaling.line_handles(curves):
        if handle.get_label() != "B_crit":  # these panels do not show it
            handles.append(handle)
    handles += scaling.bound_handles(rows)
    columns = min(len(handles), int(figure.get_figwidth() / 1.2))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, columnspacing=1.2)
