"""How a study is laid out in an Optuna storage: names, attributes, and how a result is written and read.

A study NAME is a header study of that name (user attributes only) and one study a cell, "NAME | B=16 S=0.9". A trial
of a cell has the user attribute "point" and, once it has finished, "result" as `encode_result` gives it. A trial that
Optuna calls finished but that has no result was interrupted: its point is run again, so it is left out here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral

from lit_dps.trial import Cell, Status, Trial, TrialResult

FORMAT = 1


FORMAT_ATTR, POINT_ATTR, RESULT_ATTR = "lit_dps_format", "point", "result"


def cell_study_name(name: str, cell: Cell) -> str:
    """Name of the Optuna study that holds a cell's trials."""
    return f"{name} | {cell}"


def encode_result(result: TrialResult) -> dict:
    """What is stored of a result under `RESULT_ATTR`: plain JSON, without the trial itself.

    Curve values that are not finite become "nan", "inf" and "-inf": not every database's JSON can hold them.
    """
    return {
        "status": str(result.status),
        "steps": None if result.steps is None else int(result.steps),
        "curve": {key: [_encode(x) for x in values] for key, values in result.curve.items()},
        "kept": {key: [int(kept), int(total)] for key, (kept, total) in result.kept.items()},
        "seconds": float(result.seconds),
        "smoothness": {key: [_encode(x) for x in values] for key, values in result.smoothness.items()},
        "theory": {key: _encode(x) for key, x in result.theory.items()},
        "observed": {key: _encode(x) for key, x in result.observed.items()},
        **({"failure": result.failure, "traceback": result.traceback} if result.failure else {}),
    }


def _encode(x: float | int) -> float | int | str:
    return int(x) if isinstance(x, Integral) else float(x) if math.isfinite(x) else str(float(x))


def _decode(x: float | int | str) -> float | int:
    return float(x) if isinstance(x, str) else x


def decode_result(stored: Mapping, trial: Trial) -> TrialResult:
    """The inverse of `encode_result`. Raises KeyError, TypeError, ValueError or AttributeError for anything else."""
    return TrialResult(
        trial=trial,
        status=Status(stored["status"]),
        steps=stored["steps"],
        curve={key: [_decode(x) for x in values] for key, values in stored["curve"].items()},
        kept={key: (kept, total) for key, (kept, total) in stored["kept"].items()},
        seconds=stored["seconds"],
        smoothness={key: [_decode(x) for x in values] for key, values in stored.get("smoothness", {}).items()},
        theory={key: _decode(x) for key, x in stored.get("theory", {}).items()},
        observed={key: _decode(x) for key, x in stored.get("observed", {}).items()},
        failure=stored.get("failure", ""),
        traceback=stored.get("traceback", ""),
    )
