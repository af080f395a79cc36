"""analyze: table, scaling law and figures from storage alone, also while the study runs. Needs no
torch."""

from __future__ import annotations

from argparse import SUPPRESS
from pathlib import Path

from jsonargparse import ActionConfigFile

from lit_dps.analysis.analysis import Analysis
from lit_dps.cli.parser import PlainParser
from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.errors import ConfigError
from lit_dps.report.no_result import NO_RESULT, ended_without_result
from lit_dps.report.publish import figures_folder, publish
from lit_dps.report.text import parts_of
from lit_dps.storage.database import refuse_lost
from lit_dps.storage.read import read_study
from lit_dps.storage.urls import check_place, sqlite_file, ui_command, without_password
from lit_dps.study.retrain_hint import retrain_hint

SHOW = (
    "What to print too, with commas between, or all: critical (batch sizes by definition), "
    "theory, files."
)
VALIDATE_EVERY = (
    "Steps between two validations in your own training: adds a column with the time of "
    "validation. "
    "By default validation is not counted."
)
SYNC = (
    "Also bring MLflow in step with the study: log what it lacks, delete runs of trials that "
    "are "
    "not stored."
)


def _read_over(value: object) -> None:
    """Typed as anything else, jsonargparse would import the class paths in it, and so torch."""


def main(argv: list[str]) -> int:
    """Runs the verb; argv[0] is "analyze"."""
    parser = PlainParser(prog="lit-dps analyze", description=__doc__)
    parser.add_argument(
        "-c", "--config", action=ActionConfigFile, help="The study's configuration file."
    )
    parser.add_argument(
        "--output", type=str, help="Folder of the figures; by default FOLDER/figures/NAME."
    )
    parser.add_argument("--sync", action="store_true", help=SYNC)
    parser.add_argument("--show", type=str, default="", help=SHOW)
    parser.add_argument("--validate-every", type=int, help=VALIDATE_EVERY)
    parser.add_class_arguments(StudyConfig, "study")
    parser.add_class_arguments(StorageConfig, "storage")
    # Read over, since the study knows them
    for other in (
        "model",
        "data",
        "trainer",
        "goal",
        "pruning",
        "optim",
        "local",
        "smoothness",
        "seed_everything",
    ):
        parser.add_argument(f"--{other}", type=_read_over, help=SUPPRESS)
    config = parser.instantiate_classes(parser.parse_args(argv[1:]))
    storage, name, show = config.storage, config.study.name, parts_of(config.show)
    every = validation_interval(config.validate_every)
    refuse_lost(storage, name, figures_folder(storage.folder, name))
    study, folder = (
        read(storage, name, every),
        Path(config.output or figures_folder(storage.folder, name)),
    )
    if not config.sync:
        text = publish(study, folder, show)[0]
        logged = sqlite_file(storage.mlflow_uri)
        seen = logged is None or logged.is_file()
        browse = f"browse it in MLflow: {ui_command(storage.mlflow_uri)}\n" if seen else ""
        print(text, end=f"\n{retrain_hint(study, storage)}{browse}")
        return NO_RESULT if ended_without_result(study.cells) else 0

    from lit_dps.tracking.sync import MlflowSync

    check_place(storage.mlflow_uri)
    mlflow = MlflowSync.of_study(storage, study.record.workload, name, {})
    logged = mlflow.logged()
    study = read(storage, name, every)  # anew: what is logged by now is stored by now
    text, files = publish(study, folder, show)
    mlflow.sync(study.record, study, files, logged=logged)
    print(
        f"{text}\n{retrain_hint(study, storage)}in step with it: MLflow at "
        f"{without_password(storage.mlflow_uri)}"
    )
    return NO_RESULT if ended_without_result(study.cells) else 0


def read(storage: StorageConfig, name: str, validate_every: int | None = None) -> Analysis:
    """A study as it is stored now; `validate_every` as in `Analysis`."""
    return Analysis(read_study(storage.optuna_url, name), validate_every=validate_every)


def validation_interval(value: int | None) -> int | None:
    """Return the value of `--validate-every`. Raises ConfigError unless it is at least 1, or
    None."""
    if value is not None and value < 1:
        raise ConfigError("--validate-every", value, "at least 1 step expected")
    return value
