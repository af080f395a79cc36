"""The environment of this run of a study: code, data, versions, threads and machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from typing import Any

from lightning.pytorch import LightningDataModule

from lit_dps.core.environment import (
    COMPUTED,
    DATA,
    SOURCES,
    THREADS,
    UNKNOWN,
    Environment,
    Hashes,
    files_written_by_trials,
    with_key,
)
from lit_dps.core.progress_line import print_wrapped
from lit_dps.core.record import HARDWARE
from lit_dps.core.user_code import is_installed, texts_in
from lit_dps.study.data_hashes import data_hashes
from lit_dps.study.first_steps import FAILED, first_steps
from lit_dps.study.hardware import hardware
from lit_dps.study.setup import StudySetup
from lit_dps.study.sources import source_hashes
from lit_dps.tracking.sync import environment_tags


def environment_of(
    setup: StudySetup,
    data: LightningDataModule,
    stored: Sequence[Mapping[str, Any]] = (),
) -> Environment:
    """Return the environment of this process. Call it after the dry run has imported all classes.

    Args:
        setup: The study.
        data: The data module, set up.
        stored: The stored environments of the study.

    Returns:
        Versions, machine, threads and hashes, with a key.
    """
    config = setup.config()
    tags = environment_tags(getattr(data, "digest", None))
    versions = {key: value for key, value in tags.items() if not key.startswith("mlflow.")}
    content: dict[str, Any] = {
        **versions,
        **_versions_of_packages(config),
        HARDWARE: hardware(),
        THREADS: setup.study.threads,
        SOURCES: _with_written_files(source_hashes(config), stored),
        DATA: data_hashes(setup),
    }
    computed = first_steps(setup, content, stored)
    if computed:
        content[COMPUTED] = computed
    random = [name for name in computed if computed[name] == UNKNOWN and name != FAILED]
    if random:
        print_wrapped(
            f"note: A resumed study cannot compare these values: {', '.join(random)}. They "
            "differ in two equal runs, or a run failed. Does your code draw numbers without "
            "the seed of the trial?"
        )
    return Environment(with_key(content, datetime.now().strftime("%Y-%m-%d %H:%M")))


def _with_written_files(
    sources: Mapping[str, Hashes], stored: Sequence[Mapping[str, Any]]
) -> dict[str, Hashes]:
    """Return hashes of sources, `UNKNOWN` for files that trials of the stored study write.

    So checkpoints of its trials do not depend on the content of these files.
    """
    hashes = dict(sources)
    for name in files_written_by_trials(stored) & hashes.keys():
        hashes[name] = UNKNOWN
    return hashes


def _versions_of_packages(config: Any) -> dict[str, str]:
    """Return the versions of the installed packages whose classes a configuration names."""
    packages = {text.partition(".")[0] for text in texts_in(config) if "." in text}
    versions = {}
    for package in sorted(packages - {"lit_dps", "torch", "lightning"}):
        if is_installed(sys.modules.get(package)):
            versions[f"version.{package}"] = _version_of(package)
    return versions


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # the distribution has another name; listing all takes a second
        distributions = packages_distributions().get(package, [])
        return ", ".join(sorted({version(name) for name in distributions})) or "unknown"
