"""Former names of configuration keys and of methods: they work for one more release.

A command warns once for each former name that the user wrote. The stored format keeps the former
names of keys. `as_stored` and `from_stored` translate at the boundary of the storage.
"""

from __future__ import annotations

from collections.abc import Mapping
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


def refuse_both(former: str, present: str) -> None:
    """Raise UserError, because a key is set under its former and under its present name."""
    raise UserError(
        f"{former} and {present} are one key. Remove {former}, which is its old name.", key=former
    )


def from_stored(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored configuration with the present names of its keys."""
    return _translated(config, RENAMED_KEYS)


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
