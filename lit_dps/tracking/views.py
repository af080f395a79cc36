"""How MLflow's page of runs shows a study: views that its addresses open, with columns, order and
charts.

A view is what MLflow's own "Share" button keeps: a tag of the experiment,
`mlflow.sharedViewState.KEY`, with the state of the page as JSON, which an address with
`viewStateShareKey=KEY` takes over. MLflow documents no format of it; a version that has another one
opens its page of runs as it always does. Read off MLflow 3.17 (experimentPageUIState).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from lit_dps.storage.schema import KIND_TAG, NAME_TAG, STATUS_TAG

SHARED = "mlflow.sharedViewState."
CELLS, TRIALS, CURVES = "cells", "trials", "curves"
LINES = 40  # metrics in a chart; beyond, nobody tells them apart


def view_key(study: str, view: str) -> str:
    """The key of a view of a study, of the characters that a tag takes."""
    return f"lit_dps-{hashlib.sha256(study.encode()).hexdigest()[:8]}-{view}"


def views_of(
    study: str, keys: Sequence[str], space: Sequence[str], metric: str, curves: Sequence[str]
) -> dict:
    """The views of a study, by name.

    Args:
        study: Its name.
        keys: Parameters that name a cell.
        space: Parameters that name a point.
        metric: The goal's.
        curves: Metrics of the study's run whose steps are batch sizes, K* of its series.
    """
    counts = ["complete", "incomplete", "infeasible"]
    found = ["K_star", "seconds_to_goal", "examples_to_goal", "step_seconds", *counts]
    cells = [*_params(keys), *_metrics(found)]
    trials = [
        f"tags.`{STATUS_TAG}`",
        *_metrics([metric, "steps_to_result"]),
        *_params([*keys, *space]),
    ]
    return {
        CELLS: _state(study, "cell", cells, "K_star"),
        TRIALS: _state(study, "trial", trials, "steps_to_result"),
        CURVES: _state(study, "study", [], None) | _chart(curves[:LINES]),
    }


def _state(study: str, kind: str, columns: Sequence[str], by: str | None) -> dict[str, Any]:
    order = {"orderByKey": f"metrics.`{by}`", "orderByAsc": True} if by else {}
    asked = f"tags.`{KIND_TAG}` = '{kind}' and tags.`{NAME_TAG}` = '{study}'"
    return {"searchFilter": asked, "selectedColumns": ["attributes.`Duration`", *columns], **order}


def _chart(curves: Sequence[str]) -> dict[str, Any]:
    section = {
        "uuid": "scaling",
        "name": "K* against batch size B",
        "display": True,
        "isReordered": False,
    }
    line = {
        "type": "LINE",
        "uuid": "k-star",
        "displayName": "K* (step = batch size B)",
        "metricSectionId": "scaling",
        "metricKey": curves[0] if curves else "",
        "selectedMetricKeys": list(curves),
        "xAxisKey": "step",
        "selectedXAxisMetricKey": "",
        "useGlobalXaxisKey": False,
        "useGlobalLineSmoothing": False,
        "xAxisScaleType": "log",
        "scaleType": "log",
        "lineSmoothness": 0,
        "runsCountToCompare": 10,
        "range": {},
        "isGenerated": False,
        "deleted": False,
    }
    # reordered: MLflow puts the sections that it makes itself behind this one, in place of sorting
    # all by their names
    return {
        "compareRunSections": [section],
        "compareRunCharts": [line],
        "isAccordionReordered": True,
    }


def _params(keys: Sequence[str]) -> list[str]:
    return [f"params.`{key}`" for key in keys]


def _metrics(names: Sequence[str]) -> list[str]:
    return [f"metrics.`{name}`" for name in names]
