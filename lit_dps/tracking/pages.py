"""Addresses of MLflow's pages, and shared views of a study with columns, order and charts.

A view is what the "Share" button of MLflow stores: a tag of the experiment,
`mlflow.sharedViewState.KEY`, with the state of the page as JSON. An address with
`viewStateShareKey=KEY` opens it. MLflow does not document the format. It was read off MLflow 3.17
(experimentPageUIState); a version with another format opens its page of runs as usual.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from lit_dps.storage.schema import KIND_TAG, NAME_TAG, STATUS_TAG
from lit_dps.storage.urls import is_http, without_password

SHARED = "mlflow.sharedViewState."
# Names of views.
CELLS = "cells"
TRIALS = "trials"
CURVES = "curves"
MAX_LINES = 40  # in a chart; more cannot be distinguished
UI_PORT = 5000  # of `lit-dps ui`


def page_address(uri: str, experiment_id: str, port: int = UI_PORT, view: str | None = None) -> str:
    """Return the address of an experiment's runs.

    Args:
        uri: Tracking URI. If it names no server, the address is on the server of `lit-dps ui`.
        experiment_id: The experiment.
        port: Port of `lit-dps ui`.
        view: Key of a view (`view_key`), which the page then shows.
    """
    server = f"http://127.0.0.1:{port}"
    if is_http(uri):
        server = without_password(uri).rstrip("/")
    # Without the workflow type, MLflow 3 opens its pages for language models.
    address = f"{server}/#/experiments/{experiment_id}/runs?workflowType=machine_learning"
    if view is not None:
        address += f"&viewStateShareKey={view}"
        if view.endswith(CURVES):
            address += "&compareRunsMode=CHART"
    return address


def view_key(study: str, view: str) -> str:
    """Return the key of a view of a study, with characters that a tag may have."""
    return f"lit_dps-{hashlib.sha256(study.encode()).hexdigest()[:8]}-{view}"


def views_of(
    study: str, keys: Sequence[str], space: Sequence[str], metric: str, curves: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return the views of a study by name.

    Args:
        study: Name of the study.
        keys: Parameters that identify a cell.
        space: Parameters that identify a point.
        metric: The goal's metric.
        curves: Metrics of the study's run whose steps are batch sizes: K* of each series.
    """
    counts = ["complete", "incomplete", "infeasible"]
    times = ["total_seconds_to_goal", "seconds_to_goal", "examples_to_goal", "step_seconds"]
    cell_columns = [*_params(keys), *_metrics(["K_star", *times, *counts])]
    trial_columns = [f"tags.`{STATUS_TAG}`", *_metrics([metric, "steps_to_result"])]
    trial_columns += _params([*keys, *space])
    return {
        CELLS: _state(study, "cell", cell_columns, order_by="K_star"),
        TRIALS: _state(study, "trial", trial_columns, order_by="steps_to_result"),
        CURVES: _state(study, "study", []) | _chart(curves[:MAX_LINES]),
    }


def _state(
    study: str, kind: str, columns: Sequence[str], order_by: str | None = None
) -> dict[str, Any]:
    """Return the state of a page that shows the runs of one kind."""
    state: dict[str, Any] = {
        "searchFilter": f"tags.`{KIND_TAG}` = '{kind}' and tags.`{NAME_TAG}` = '{study}'",
        "selectedColumns": ["attributes.`Duration`", *columns],
    }
    if order_by is not None:
        state["orderByKey"] = f"metrics.`{order_by}`"
        state["orderByAsc"] = True
    return state


def _chart(curves: Sequence[str]) -> dict[str, Any]:
    """Return the state of a page with one chart of K* against batch size."""
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
        "metricKey": next(iter(curves), ""),
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
    return {
        "compareRunSections": [section],
        "compareRunCharts": [line],
        # Otherwise MLflow sorts this section among its own sections by name; now it comes first.
        "isAccordionReordered": True,
    }


def _params(keys: Sequence[str]) -> list[str]:
    return [f"params.`{key}`" for key in keys]


def _metrics(names: Sequence[str]) -> list[str]:
    return [f"metrics.`{name}`" for name in names]
