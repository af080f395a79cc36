"""The readings of the package by name, and the readings that a configuration names.

A configuration names readings in `study.readings`, by a name of `READINGS` or by a class path.
The section `smoothness` is another name of the reading `lipschitz` with its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_dps.core.errors import ConfigError
from lit_dps.core.registry import name_of_class, named_class
from lit_dps.core.trial import LIPSCHITZ
from lit_dps.core.trial_config import SmoothnessConfig
from lit_dps.readings.curvature import Curvature
from lit_dps.readings.gradient import GradientNoise, GradientNorm
from lit_dps.readings.lipschitz import Lipschitz
from lit_dps.readings.reading import KEY, Reading, check_attributes
from lit_dps.readings.spent import Examples, PeakMemory, StepSeconds

# Readings of the package, by their name in the configuration.
READINGS: dict[str, type[Reading]] = {
    LIPSCHITZ: Lipschitz,
    GradientNorm.name: GradientNorm,
    GradientNoise.name: GradientNoise,
    Curvature.name: Curvature,
    StepSeconds.name: StepSeconds,
    PeakMemory.name: PeakMemory,
    Examples.name: Examples,
}


@dataclass(frozen=True)
class ReadingSpec:
    """A reading of the configuration.

    Attributes:
        kind: The class.
        class_path: Its name in the configuration.
        init_args: Arguments of its constructor.
    """

    kind: type[Reading]
    class_path: str
    init_args: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Reading:
        """Return a fresh reading.

        Raises:
            ConfigError: if the class refuses its arguments, or describes no reading.
        """
        try:
            reading = self.kind(**self.init_args)
        except ConfigError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(KEY, self.class_path, f"arguments that it takes: {error}") from error
        check_attributes(reading, self.class_path)
        return reading

    @property
    def identity(self) -> dict[str, Any]:
        """The reading as plain JSON, the same for all ways to write it."""
        class_path = self.class_path
        if READINGS.get(self.kind.name) is self.kind:
            class_path = self.kind.name
        return {"class_path": class_path, "init_args": dict(self.init_args)}


def resolve_readings(
    entries: Sequence[Any], smoothness: SmoothnessConfig | None = None
) -> tuple[ReadingSpec, ...]:
    """Return the readings that a configuration names.

    Args:
        entries: Each is a name of `READINGS`, a class path, a mapping {class_path, init_args}, or a
            `ReadingSpec`.
        smoothness: The section `smoothness`; its reading is the last one.

    Raises:
        ConfigError: for an unknown class, arguments that it refuses, or two readings of one name.
    """
    specs = [_resolve(entry) for entry in entries]
    if smoothness is not None and smoothness.interval is not None:
        specs.append(ReadingSpec(Lipschitz, LIPSCHITZ, vars(smoothness)))
    names = set()
    for spec in specs:
        reading = spec.build()
        if reading.name in names:
            raise ConfigError(KEY, reading.name, "readings with different names")
        ours = READINGS.get(reading.name)
        if ours is not None and not isinstance(reading, ours):
            allowed = (
                f"a class with another name, because {reading.name} is a reading of the package"
            )
            raise ConfigError(KEY, spec.class_path, allowed)
        names.add(reading.name)
    return tuple(specs)


def without_lipschitz(
    entries: Sequence[Any], smoothness: SmoothnessConfig
) -> tuple[list[Any], SmoothnessConfig]:
    """Return the entries of `study.readings` without `Lipschitz`, and the section that it means.

    So both ways to write it are one study, and what asks the section knows of it.

    Raises:
        ConfigError: for arguments that it refuses, or if it is in both places.
    """
    others = []
    for entry in entries:
        class_path = entry.get("class_path") if isinstance(entry, Mapping) else entry
        is_name = isinstance(class_path, str)
        if not is_name or name_of_class(class_path, READINGS) != LIPSCHITZ:
            others.append(entry)
            continue
        if smoothness.interval is not None:
            raise ConfigError(KEY, LIPSCHITZ, "readings with different names")
        reading = _resolve(entry).build()
        assert isinstance(reading, Lipschitz)
        smoothness = reading.config
    return others, smoothness


def _resolve(entry: Any) -> ReadingSpec:
    """Return the reading of one entry of the configuration."""
    if isinstance(entry, ReadingSpec):
        return entry
    arguments: Any = {}
    class_path = entry
    if isinstance(entry, Mapping):
        unknown = set(entry) - {"class_path", "init_args"}
        if unknown or not isinstance(entry.get("class_path"), str):
            allowed = "a mapping with the keys class_path and init_args"
            raise ConfigError(KEY, dict(entry), allowed)
        class_path = entry["class_path"]
        arguments = entry.get("init_args") or {}
    if not isinstance(class_path, str) or not isinstance(arguments, Mapping):
        raise ConfigError(KEY, entry, "a name, a class path, or {class_path, init_args}")
    kind = named_class(KEY, class_path, READINGS, Reading)
    return ReadingSpec(kind, class_path, dict(arguments))
