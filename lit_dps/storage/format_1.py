"""What changed between format 1 and format 2: each kind of stored object, translated.

Only `lit_dps.storage.migrate` uses these functions.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from lit_dps.core.aliases import RENAMED_KEYS, present_engine
from lit_dps.core.environment import KEY, with_key
from lit_dps.core.goal import Goal
from lit_dps.core.trial import LIPSCHITZ, THEORY
from lit_dps.storage import schema
from lit_dps.storage.columns import decode_columns, encode_columns

# Names of engines in results. "sparse" is an engine that was removed.
FORMER_ENGINES = {"interval loop": "single", "stack": "stacked", "Lightning": "lightning"}


def convert_header(name: str, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user attributes of a header in format 2."""
    former = dict(attrs)
    seed = former["seed"]
    plan = former.pop("repeats", {})
    environments = [_convert_environment(each) for each in former.pop("environments", [])]
    return {
        schema.ABOUT: f"study {name}: K* of each cell; the trials of a cell are in {name} | B=...",
        schema.UID: uuid.uuid4().hex,
        schema.TRIAL_SEED: seed,
        schema.AXES: {},
        schema.GOALS: [],
        **schema.UNMEASURED,
        schema.RACE_FACTOR: former.pop("slack", None),
        schema.TRAIN_PAST_GOAL: former.pop("run_on", False),
        schema.SPACE_HISTORY: former.pop("boxes", []),
        **former,
        schema.IDENTITY: convert_identity(former["identity"]),
        schema.CONFIG: convert_config(former["config"]),
        schema.GOAL: _convert_goal(former["goal"]).to_stored(),
        schema.REPEATS: {
            "count": plan.get("count", 0),
            "points": plan.get("points", 1),
            schema.RACE_FACTOR: plan.get("slack", 8.0),
        },
        schema.ENVIRONMENTS: environments,
        schema.MADE_BY: "lit_dps",
        schema.FORMAT_ATTR: schema.FORMAT,
    }


def convert_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the present names of its keys and of its engine."""
    study = {}
    for name, value in config.get("study", {}).items():
        key = RENAMED_KEYS.get(f"study.{name}", f"study.{name}")
        study[key.removeprefix("study.")] = value
    lean = study.pop("lean", True)
    if "engine" in study:
        study["engine"] = present_engine(study["engine"], lean)
    return {**config, "study": study}


def convert_identity(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity with the present names of its keys."""
    study = dict(identity.get("study", {}))
    if "run_on" in study:
        study["train_past_goal"] = study.pop("run_on")
    return {**identity, "study": study} if study else dict(identity)


def _convert_goal(stored: Mapping[str, Any]) -> Goal:
    values = dict(stored)
    if "error" in values:
        values["value"] = values.pop("error")
    if "rule" in values:
        # Format 1 had no rules, and a class path would be imported.
        raise ValueError(f"goal.rule is {values['rule']!r}, which format 1 does not have")
    return Goal(**values)


def _convert_environment(environment: Mapping[str, Any]) -> dict[str, Any]:
    if KEY in environment:
        return dict(environment)
    return with_key(environment, since="")


def convert_cell(attrs: Mapping[str, Any], uid: str | None) -> dict[str, Any]:
    """Return the user attributes of a cell in format 2."""
    return {schema.AXES: {}, schema.UID: uid, **attrs}


def convert_trial(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user attributes of a trial of a cell in format 2."""
    converted = dict(attrs)
    failed_at, failed_in = converted.pop("failed_at", None), converted.pop("failed_in", 0)
    converted.setdefault(schema.REPEAT_ATTR, 0)
    owner = converted.get(schema.OWNER)
    if owner is not None:
        converted.setdefault(schema.ENVIRONMENT, None)
    if schema.RESULT_ATTR in converted:
        result = convert_result(converted[schema.RESULT_ATTR], failed_at, failed_in)
        converted[schema.RESULT_ATTR] = result
        converted[schema.STATUS_ATTR] = result["status"]
        converted.setdefault(schema.ENVIRONMENT, None)
    return converted


def convert_result(
    former: Mapping[str, Any], failed_at: float | None = None, failed_in: int = 0
) -> dict[str, Any]:
    """Return the result of a trial in format 2."""
    engine: str = former.get("engine", "")
    readings = {}
    lipschitz = decode_columns(former.get("smoothness", {}))
    if lipschitz.get("step"):
        readings["readings"] = {LIPSCHITZ: encode_columns(lipschitz)}
    flags = dict(former.get("observed", {}))
    for name, value in former.get("theory", {}).items():
        flags[f"{THEORY}{name}"] = value
    return {
        "status": former["status"],
        "steps": former["steps"],
        "curve": encode_columns(decode_columns(former["curve"])),
        "kept": former["kept"],
        "seconds": former["seconds"],
        **readings,
        "flags": flags,
        "engine": FORMER_ENGINES.get(engine, engine),
        "engine_reason": former.get("engine_reason", ""),
        "timed": former.get("timed", {}),
        "failure": former.get("failure", ""),
        "traceback": former.get("traceback", ""),
        schema.FAILED_AT: failed_at,
        schema.FAILED_IN: failed_in,
    }


def convert_advice(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user attributes of advice in format 2."""
    converted = dict(attrs)
    if "timed" in converted:
        converted.setdefault("waited", 0.0)
    if "branches" in converted:
        converted.setdefault("branch_scaled", False)
    outcomes = []
    for outcome in converted.get("outcomes", []):
        # Without other_hours, the hours include the time to begin, to log and to save.
        outcomes.append({"real_devices": outcome["devices"], **outcome})
    if outcomes:
        converted["outcomes"] = outcomes
    if "configuration" in converted:
        converted["configuration"] = convert_identity(converted["configuration"])
    return {**converted, schema.MADE_BY: "lit_dps", schema.ADVICE_FORMAT: schema.FORMAT}
