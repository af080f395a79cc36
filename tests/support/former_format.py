"""Rewrites a storage of the present format as format 1, as the first versions stored it."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

from optuna.storages._rdb.models import StudyUserAttributeModel, TrialUserAttributeModel
from sqlalchemy import select
from sqlalchemy.orm import Session

from lit_dps.core.trial import LIPSCHITZ, THEORY
from lit_dps.storage import schema
from lit_dps.storage.columns import decode_columns
from lit_dps.storage.database import temporary_storage


def to_former_format(url: str) -> None:
    """Rewrite all studies and all advice of a storage as format 1."""
    with temporary_storage(url) as storage:
        for study in storage.get_all_studies():
            former = _former_study(dict(study.user_attrs))
            _replace(storage, StudyUserAttributeModel, "study_id", study._study_id, former)
            for trial in storage.get_all_trials(study._study_id, deepcopy=False):
                if schema.POINT_ATTR in trial.user_attrs:
                    attrs = _former_trial(dict(trial.user_attrs))
                    _replace(storage, TrialUserAttributeModel, "trial_id", trial._trial_id, attrs)


def _replace(storage, model, column: str, number: int, attrs: dict) -> None:
    with Session(storage.engine) as session, session.begin():
        for row in session.scalars(select(model).where(getattr(model, column) == number)):
            session.delete(row)
        session.flush()
        for key, value in attrs.items():
            session.add(model(**{column: number}, key=key, value_json=json.dumps(value)))


def _former_study(attrs: dict) -> dict:
    if attrs.pop(schema.ADVICE_FORMAT, None) is not None:
        attrs.pop(schema.MADE_BY)
        return attrs
    if attrs.pop(schema.FORMAT_ATTR, None) is None:  # a cell
        if not attrs.get(schema.AXES, True):
            del attrs[schema.AXES]
        return attrs
    for key in (
        schema.AXES,
        schema.NOISE,
        schema.STEP_TIMING,
        schema.REPORTED,
        schema.ENVIRONMENTS,
    ):
        if not attrs[key]:
            del attrs[key]
    goal = dict(attrs[schema.GOAL])
    steps = {key: goal[key] for key in ("check_interval", "max_steps")}
    if goal["metric"] == "val_error":
        attrs[schema.GOAL] = {"error": goal["value"], **steps}
    if attrs[schema.TRIAL_SEED] == attrs[schema.SEED]:
        del attrs[schema.TRIAL_SEED]
    attrs["slack"] = attrs.pop(schema.RACE_FACTOR)
    if attrs.pop(schema.TRAIN_PAST_GOAL):
        attrs["run_on"] = True
    boxes = attrs.pop(schema.SPACE_HISTORY)
    if boxes:
        attrs["boxes"] = boxes
    plan = dict(attrs.pop(schema.REPEATS))
    if plan["count"]:
        attrs["repeats"] = {**plan, "slack": plan.pop(schema.RACE_FACTOR)}
    config = dict(attrs[schema.CONFIG])
    if "study" in config:
        study = dict(config["study"])
        study["slack"] = study.pop("race_factor", 2.0)
        study["run_on"] = study.pop("train_past_goal", False)
        config["study"] = study
    return {**attrs, schema.CONFIG: config, schema.FORMAT_ATTR: 1}


def _former_trial(attrs: dict) -> dict:
    if attrs[schema.REPEAT_ATTR] == 0:
        del attrs[schema.REPEAT_ATTR]
    if attrs.get(schema.ENVIRONMENT, "") is None:
        del attrs[schema.ENVIRONMENT]
    if schema.RESULT_ATTR not in attrs:
        return attrs
    result = dict(attrs[schema.RESULT_ATTR])
    failed_at, failed_in = result.pop(schema.FAILED_AT), result.pop(schema.FAILED_IN)
    if failed_at is not None:
        attrs |= {"failed_at": failed_at, "failed_in": failed_in}
    result["smoothness"] = result.pop("readings", {}).get(LIPSCHITZ, {})
    for key in ("curve", "smoothness"):
        result[key] = _former_columns(result[key])
    result |= {"observed": {}, "theory": {}}
    for name, value in result.pop("flags").items():
        if name.startswith(THEORY):
            result["theory"][name.removeprefix(THEORY)] = value
        else:
            result["observed"][name] = value
    for key in ("engine", "engine_reason", "timed", "failure", "traceback"):
        if not result[key]:
            del result[key]
    attrs[schema.RESULT_ATTR] = result
    return attrs


def _former_columns(columns: dict) -> dict:
    former = {}
    for name, values in decode_columns(columns).items():
        former[name] = [value if abs(value) < float("inf") else str(value) for value in values]
    return former


def dump(file: Path) -> list[str]:
    """Return the content of a SQLite file as statements."""
    with closing(sqlite3.connect(file)) as connection:
        return list(connection.iterdump())
