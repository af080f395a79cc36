"""What a notebook calls: `load` reads a study that is stored, `run` runs one as the command line
does."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lit_dps.cli import leave_if_unguarded
from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.errors import Unguarded
from lit_dps.parallel.process import INTERRUPTED
from lit_dps.report.notebook import Study
from lit_dps.storage.read import open_elsewhere, read_study


def load(study: str, storage: str | Path = "mlruns") -> Study:
    """Reads a study, finished or not. Needs no torch.

    Args:
        study: Its name.
        storage: The storage folder of the study (storage.folder), a sqlite file (.db, or compressed
            .db.xz), or an Optuna URL.

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
    """Runs a study, or takes it up where it stopped, as `lit-dps study --config FILE` does, and
    reads it.

    A script calls it below `if __name__ == "__main__":`, since workers may be processes that run
    the script again.

    Args:
        config: A configuration file, or what stands in one.
        accept_code_change: Whether to resume a study although your code or data changed since its
            trials ran.

    Returns:
        The study. Where trials failed, that is told on stderr.

    Raises:
        UserError: in one line, for configuration, data or storage that do not serve.
        SystemExit: with that line printed, for a script without the guard: it is the script that
            ends.
        KeyboardInterrupt: where it was interrupted; what is stored stays stored.
    """
    leave_if_unguarded()
    from lit_dps.cli import study  # torch and Lightning
    from lit_dps.cli.command_line import expand_short_forms, study_and_storage

    if isinstance(config, Mapping):
        with tempfile.TemporaryDirectory() as folder:
            # A study without a name is called after the file.
            file = Path(folder, f"{StudyConfig.name}.yaml")
            file.write_text(yaml.safe_dump(_plain(config)), encoding="utf-8")
            return run(file, accept_code_change)
    options = [study.ACCEPT] if accept_code_change else []
    argv = expand_short_forms(["study", "--config", str(config), *options])
    before = sys.argv
    try:
        code = study.main(argv)
    except Unguarded as error:
        print(f"lit-dps: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    finally:
        sys.argv = before
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    name, storage = study_and_storage(argv[1:])
    return load(name, storage.optuna_url)


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _plain(value) if isinstance(value, Mapping) else value for key, value in config.items()
    }
