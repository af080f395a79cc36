"""Former names of configuration keys and of methods: they work for one more release.

A command warns once for each former name that the user wrote. The stored format keeps the former
names of keys. `as_stored` and `from_stored` translate at the boundary of the storage.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from lit_dps.core.errors import UserError

# Present names of configuration keys, by former name.
RENAMED_KEYS = {
    "study.slack": "study.race_factor",
    "study.run_on": "study.train_past_goal",
}
# Present names of methods of the user's module, by former name.
RENAMED_METHODS = {"wrongness": "per_example_error"}


def present_key(key: str) -> str:
    """Return the present name of a configuration key."""
    return RENAMED_KEYS.get(key, key)


def rename_warning(former: str, present: str) -> str:
    """Return the line that warns of a former name."""
    return f"{former} is now {present}; the old name will be removed in the next release."


@cache
def warn_of_former_name(former: str, present: str) -> None:
    """Warn of a former name, once in a command: workers and further ranks do not warn."""
    if multiprocessing.parent_process() is None and os.environ.get("RANK", "0") == "0":
        print(f"lit-dps: warning: {rename_warning(former, present)}", file=sys.stderr)


def present_engine(engine: str, lean: bool | None) -> str:
    """Return the present value of `study.engine`.

    Args:
        engine: Its former or present value.
        lean: The former key `study.lean`; None if it is left out, as in present configurations.
    """
    if lean is False:
        return "lightning"
    if lean and engine == "lightning":
        return "single"  # the former meaning of "lightning"
    # "sparse" is an engine of stored studies that was removed. It did not change results.
    return {"fused": "stacked", "sparse": "single"}.get(engine, engine)


def refuse_both(former: str, present: str) -> None:
    """Raise UserError, because a key is set under its former and under its present name."""
    raise UserError(
        f"{former} and {present} are one key. Remove {former}, which is its old name.", key=former
    )


def from_stored(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored configuration with the present names of its keys and of its engine."""
    translated = _translated(config, RENAMED_KEYS)
    study = translated.get("study")
    if isinstance(study, dict) and "engine" in study:
        study["engine"] = present_engine(study["engine"], study.pop("lean", None))
    return translated


def as_stored(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the names of keys in the stored format."""
    return _translated(config, {present: former for former, present in RENAMED_KEYS.items()})


def _translated(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a configuration with other names for the keys of its sections."""
    translated = dict(config)
    for section, keys in config.items():
        if isinstance(keys, Mapping):
            translated[section] = {}
            for name, value in keys.items():
                key = names.get(f"{section}.{name}", f"{section}.{name}")
                translated[section][key.removeprefix(f"{section}.")] = value
    return translated
