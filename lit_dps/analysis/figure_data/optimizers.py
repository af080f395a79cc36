"""K* against batch size for several update rules (Lee et al. 2021, Figure 2), as rows."""

from __future__ import annotations

from collections.abc import Sequence

from lit_dps.analysis.figure_data.scaling import bound_notes, common_batch_size, curve_rows
from lit_dps.analysis.results import StudyRecord
from lit_dps.analysis.scaling import FittedStudy
from lit_dps.analysis.summary import setting
from lit_dps.analysis.text import Row

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
