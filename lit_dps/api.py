"""What a notebook calls: `load` reads a study that is stored, `run` runs one as the command line does."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lit_dps.analysis import Study
from lit_dps.cli import leave_if_unguarded
from lit_dps.config import StorageConfig, StudyConfig
from lit_dps.errors import Unguarded
from lit_dps.runtime import INTERRUPTED
from lit_dps.store.read import open_elsewhere, read_study


def load(study: str, storage: str | Path = "mlruns") -> Study:
    """Reads a study, finished or not. Needs no torch.

    Args:
        study: Its name.
        storage: The folder that it was run in, as storage.folder has it, a sqlite file (.db, or compressed .db.xz), or
            an Optuna URL.

    Raises:
        StorageError: in one line, if it is not there.
    """
    place = str(storage)
    if place.endswith((".db", ".xz")) and not Path(place).is_dir():
        with open_elsewhere(place, "") as elsewhere:
            return Study(read_study(elsewhere.storage, study))
    url = place if "://" in place else StorageConfig(folder=place).optuna_url
    return Study(read_study(url, study))


def run(config: str | Path | Mapping[str, Any], accept_code_change: bool = False) -> Study:
    """Runs a study, or takes it up where it stopped, as `lit-dps study --config FILE` does, and reads it.

    A script calls it below `if __name__ == "__main__":`, since workers may be processes that run the script again.

    Args:
        config: A configuration file, or what stands in one.
        accept_code_change: Whether to go on with a study though your code or data changed since its trials ran.

    Returns:
        The study. Where trials failed, that is told on stderr.

    Raises:
        UserError: in one line, for configuration, data or storage that do not serve.
        SystemExit: with that line printed, for a script without the guard: it is the script that ends.
        KeyboardInterrupt: where it was interrupted; what is stored stays stored.
    """
    leave_if_unguarded()
    from lit_dps.cli import study  # torch and Lightning

    if isinstance(config, Mapping):
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
            yaml.safe_dump(_plain(config), file)
            file.flush()
            return run(file.name, accept_code_change)
    name, storage = _whereabouts(Path(config))
    before = sys.argv
    try:
        options = [study.ACCEPT] if accept_code_change else []
        code = study.main(["study", "--config", str(config), *options])
    except Unguarded as error:
        print(f"lit-dps: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    finally:
        sys.argv = before
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    return load(name, storage.optuna_url)


def _whereabouts(config: Path) -> tuple[str, StorageConfig]:
    """The name of a configuration file's study, and its storage. A section may be the name of a file beside it."""
    found = yaml.safe_load(config.read_text(encoding="utf-8"))
    sections = [found.get("study") or {}, found.get("storage") or {}]
    for i, given in enumerate(sections):
        if isinstance(given, str):
            sections[i] = yaml.safe_load((config.parent / given).read_text(encoding="utf-8"))
    study, storage = sections
    return study.get("name", StudyConfig.name), StorageConfig(**storage)


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(value) if isinstance(value, Mapping) else value for key, value in config.items()}
