"""analyze: table, scaling law and figures of a study, also while it runs.

It reads the storage alone, and needs no PyTorch.
"""

from __future__ import annotations

from argparse import SUPPRESS
from pathlib import Path
from typing import Any

from jsonargparse import ActionConfigFile  # pyright: ignore[reportPrivateImportUsage]

from lit_dps.analysis.analysis import Analysis
from lit_dps.cli.command_line import CommandLine
from lit_dps.cli.json_output import Outcome, with_document
from lit_dps.cli.options import AnalyzeOptions, add_options, take_options
from lit_dps.cli.parser import CommandParser, new_parser
from lit_dps.core.atomic_write import check_folder
from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.exit_codes import ExitCode
from lit_dps.core.text import terminal_width
from lit_dps.report.fixed_data import fixed_data_text
from lit_dps.report.no_result import ended_without_result
from lit_dps.report.notebook import Study
from lit_dps.report.publish import PAGE, figures_folder, publish
from lit_dps.report.scale_up import scale_of, scale_up_text
from lit_dps.report.text import parts_of
from lit_dps.storage.database import refuse_lost
from lit_dps.storage.read import read_study, with_changed_samples
from lit_dps.storage.urls import check_place, sqlite_file, ui_hint, without_password
from lit_dps.study.retrain_hint import retrain_hint

# Sections of the configuration that are ignored: the storage has what the study was run with.
IGNORED = (
    "model",
    "data",
    "trainer",
    "goal",
    "pruning",
    "optim",
    "local",
    "smoothness",
    "batch",
    "seed_everything",
)


def _ignored(value: object) -> None:
    """Replace an ignored value. For any other type, jsonargparse would import class paths in it."""


@with_document
def main(command: CommandLine) -> Outcome:
    """Print the analysis of a study, and return the exit code."""
    config = _parser(command).read_command()
    options = take_options(config, AnalyzeOptions)
    if options.output is not None:
        check_folder("--output", Path(options.output))
    if options.scale is not None:
        scale_of(options.scale)  # refused before the figures are drawn
    storage, name = config.storage, config.study.name
    shown = parts_of(options.show)
    default_folder = figures_folder(storage.folder, name)
    folder = Path(options.output or default_folder)
    refuse_lost(storage, name, default_folder)
    study = read(storage, name, options.validate_every, options.trust)
    if options.statistic is not None:
        study = study.with_statistic(options.statistic)
        if options.output is None:
            folder = default_folder / options.statistic
    if options.sync:
        study = _publish_and_sync(storage, study, folder, shown, options)
        return _outcome(study, folder)
    text = publish(study, folder, shown, width=terminal_width(), ui=_ui_hint(storage))[0]
    if options.scale is not None:
        text += f"\n{scale_up_text(study, options.scale)}"
    if options.examples is not None:
        text += f"\n{fixed_data_text(study, options.examples)}"
    print(text, end=retrain_hint(study, storage))
    return _outcome(study, folder)


def _parser(command: CommandLine) -> CommandParser:
    parser = new_parser(command, __doc__)
    parser.add_argument(
        "-c", "--config", action=ActionConfigFile, help="The study's configuration file."
    )
    add_options(parser, AnalyzeOptions)
    parser.add_class_arguments(StudyConfig, "study")
    for section in IGNORED:
        parser.add_argument(f"--{section}", type=_ignored, help=SUPPRESS)
    return parser


def _publish_and_sync(
    storage: StorageConfig,
    study: Analysis,
    folder: Path,
    shown: tuple[str, ...],
    options: AnalyzeOptions,
) -> Analysis:
    """Print the analysis of a study, and update MLflow; return the analysis."""
    from lit_dps.tracking.sync import MlflowSync, unstored_trials

    check_place(storage.mlflow_uri)
    name = study.record.name
    mlflow = MlflowSync.of_study(storage, study.record.workload, name, {})
    # Read after the logged trials, so that each of them is stored by then.
    logged = mlflow.logged()
    all_results = read_study(storage.optuna_url, name, trust=True, truncates=False)
    obsolete = unstored_trials(logged, all_results)
    # Read again, because processes may have stored results since.
    study = read(storage, name, options.validate_every, options.trust)
    text, files = publish(study, folder, shown, width=terminal_width())
    mlflow.sync(study.record, study, files, logged=logged, obsolete=obsolete)
    print(
        f"{text}{retrain_hint(study, storage)}MLflow is up to date: "
        f"{without_password(storage.mlflow_uri)}"
    )
    return study


def _ui_hint(storage: StorageConfig) -> str:
    """Return the command that opens MLflow; empty if nothing is logged there."""
    file = sqlite_file(storage.mlflow_uri)
    if file is not None and not file.is_file():
        return ""
    return ui_hint(storage.mlflow_uri)


def _outcome(study: Analysis, folder: Path) -> Outcome:
    """Return the exit code of an analysis, and its document with the page in a folder."""
    code = ExitCode.NO_RESULT if ended_without_result(study.cells) else ExitCode.DONE
    page = folder / PAGE

    def document() -> dict[str, Any]:
        return Study(study.record, study).to_dict(str(page) if page.is_file() else None)

    return Outcome(code, document)


def read(
    storage: StorageConfig, name: str, validate_every: int | None = None, trust: bool = False
) -> Analysis:
    """Return the analysis of a study as it is stored now.

    Args:
        storage: Where the study is kept.
        name: Its name.
        validate_every: Steps between two validations in the user's training; see `Analysis`.
        trust: As in `read_study`.
    """
    url = storage.optuna_url
    record = with_changed_samples(read_study(url, name, trust), url, trust)
    return Analysis(record, validate_every=validate_every)
