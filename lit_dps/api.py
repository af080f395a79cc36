"""What a notebook calls: `load` reads a stored study, `run` runs one as the command line does.

`advise` gives advice, from runs that exist.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lit_dps.cli import leave_if_unguarded
from lit_dps.core.config import StorageConfig
from lit_dps.core.errors import Unguarded, UserError
from lit_dps.parallel.process import INTERRUPTED
from lit_dps.report.notebook import Study
from lit_dps.storage.read import open_elsewhere, read_study

if TYPE_CHECKING:
    import pandas as pd

    from lit_dps.advice.result import Advice


def load(study: str, storage: str | Path = "mlruns") -> Study:
    """Read a study, finished or not. Needs no PyTorch.

    Args:
        study: The name of the study.
        storage: The storage folder of the study (storage.folder), a sqlite file (.db, or compressed
            .db.xz), or an Optuna URL.

    Raises:
        StorageError: if the study does not exist; in one line.
    """
    if not isinstance(study, str):
        raise TypeError(f"load takes the name of a study as str, not {type(study).__name__}")
    if not isinstance(storage, (str, Path)):
        kind = type(storage).__name__
        raise TypeError(f"load takes a folder, a file or a URL as storage, not {kind}")
    place = str(storage)
    if place.endswith((".db", ".xz")) and not Path(place).is_dir():
        with open_elsewhere(place, "") as elsewhere:
            return Study(read_study(elsewhere.storage, study))
    url = place if "://" in place else StorageConfig(folder=place).optuna_url
    return Study(read_study(url, study))


def run(config: str | Path | Mapping[str, Any], accept_code_change: bool = False) -> Study:
    """Run or resume a study, as `lit-dps study --config FILE` does, and read it.

    A script calls it below `if __name__ == "__main__":`, because workers may be processes that run
    the script again.

    Args:
        config: A configuration file, or its content.
        accept_code_change: Whether to resume a study although your code or data changed since its
            trials ran.

    Returns:
        The study. Failed trials are reported on stderr.

    Raises:
        UserError: for a configuration, data or storage that cannot be used; in one line.
        SystemExit: for a script without the guard; the line is printed, and the script ends.
        KeyboardInterrupt: if the study is interrupted; its finished trials are stored.
    """
    leave_if_unguarded()
    if not isinstance(config, (str, Path, Mapping)):
        kind = type(config).__name__
        raise TypeError(f"run takes a configuration file or a dict of its keys, not {kind}")
    from lit_dps.cli import study  # imports torch and Lightning
    from lit_dps.cli.command_line import CommandLine
    from lit_dps.cli.key_checks import check_command

    text = str(config)
    if isinstance(config, Mapping):
        text = yaml.safe_dump(_plain(config))
    options = ["--accept-code-change"] if accept_code_change else []
    command = CommandLine(["study", "--config", text, *options])
    command.warn_of_former_keys()
    try:
        check_command(command)
        code = study.main(command)
    except Unguarded as error:
        print(f"lit-dps: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except UserError as error:
        error.args = (command.with_source(error),)
        raise
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    return load(command.study_name, command.storage.optuna_url)


def advise(
    runs: pd.DataFrame,
    goal: str | None = None,
    devices: Sequence[int] | None = None,
    batch_sizes: Sequence[int] | None = None,
    price: float | None = None,
    columns: Mapping[str, str] | None = None,
) -> Advice:
    """Return advice from runs that exist, as `lit-dps advise --runs` does. Needs no PyTorch.

    Args:
        runs: One row per run. Columns batch_size [examples of an optimizer step] and steps (to the
            goal); or step and a metric, one row per validation. Optional columns: learning_rate;
            censored, 1 for a run that missed the goal, whose steps are a lower bound; seed;
            devices; step_seconds; check [steps between validations]; run, a name.
        goal: The goal of loss curves, such as "val_loss <= 0.2" or "val_accuracy >= 0.98".
        devices: Numbers of devices to answer for; by default those of the runs.
        batch_sizes: Batch sizes to answer for; by default up to four times beyond the runs.
        price: Price of a device-hour.
        columns: Names of columns, such as {"batch_size": "bs"}.

    Returns:
        The advice: `best` (the recommended row), `table`, `law`, `next_run`, `notes`, `text`, and
        `to_dict()`, the document of `--json`.

    Raises:
        ConfigError: for a missing column, a wrong value or a run that occurs twice; in one line.
    """
    import pandas as pd

    from lit_dps.advice.existing_runs import advise_on_runs
    from lit_dps.advice.run_table import read_goal, read_runs

    if not isinstance(runs, pd.DataFrame):
        raise TypeError(f"advise takes a DataFrame of runs, not {type(runs).__name__}")
    curve_goal = None if goal is None else read_goal(goal)
    table = read_runs(runs, "runs", columns, curve_goal)
    return advise_on_runs(table, batch_sizes, devices, price, goal=goal)


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings as plain dicts, which YAML can represent."""
    plain = {}
    for key, value in config.items():
        plain[key] = _plain(value) if isinstance(value, Mapping) else value
    return plain
