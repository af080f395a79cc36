"""Studies and what their trials have in common, from the sections of a configuration as dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningDataModule

from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.trial_config import TRIAL_SECTIONS
from lit_dps.engines.trial_settings import TrialSettings
from lit_dps.readings.registry import resolve_readings
from lit_dps.study.preflight.check import check_configuration, check_with_dry_run
from lit_dps.study.setup import StudySetup
from lit_dps.training.workload import Workload

ANY_GOAL = {"error": 0.1}  # for tests that train nothing


def sections(**values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a configuration by name; a goal that is left out is `ANY_GOAL`."""
    values = {**values, "goal": values.get("goal") or ANY_GOAL}
    return {name: TRIAL_SECTIONS[name](**value) for name, value in values.items()}


def setup_of(
    study: StudyConfig,
    storage: StorageConfig,
    workload: Workload,
    goal: Mapping[str, Any],
    pruning: Mapping[str, Any] | None = None,
    smoothness: Mapping[str, Any] | None = None,
    **others: Mapping[str, Any],
) -> StudySetup:
    """Return a study."""
    common = {"goal": goal, "pruning": pruning or {}, "smoothness": smoothness or {}, **others}
    return StudySetup(study, storage, workload, **sections(**common))


def training_of(
    workload: Workload,
    goal: Mapping[str, Any],
    pruning: Mapping[str, Any] | None = None,
    **others: Any,
) -> TrialSettings:
    """Return what trials have in common; `others` are further arguments of `TrialSettings`."""
    configs = {name: others.pop(name) for name in TRIAL_SECTIONS if name in others}
    common = sections(**{"goal": goal, "pruning": pruning or {}, **configs})
    readings = resolve_readings(others.pop("readings", ()), common.pop("smoothness", None))
    return TrialSettings(workload, **common, readings=readings, **others)


def check(setup: StudySetup) -> LightningDataModule:
    """Check the configuration of a study, then run it dry. Return its data module, set up."""
    check_configuration(setup)
    return check_with_dry_run(setup)[0]
