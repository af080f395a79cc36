"""fit --of: train a trial of a stored study again, and possibly keep its weights.

The goal, seeds, data order, mask and threads equal the stored ones, so K equals the stored K.
Nothing is stored.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import yaml

from lit_dps.cli.command_line import CommandLine
from lit_dps.cli.json_output import Outcome, with_document
from lit_dps.cli.options import RetrainOptions, add_options, take_options
from lit_dps.cli.parser import new_parser
from lit_dps.cli.study import read_setup
from lit_dps.core.attempt import Attempt
from lit_dps.core.config import StorageConfig
from lit_dps.core.config_yaml import ConfigDumper
from lit_dps.core.errors import UserError
from lit_dps.core.exit_codes import ExitCode
from lit_dps.core.record import StudyRecord
from lit_dps.core.text import escape, shorten
from lit_dps.core.trial import Status, TrialResult, check_printable, text_of
from lit_dps.core.unit import EXAMPLES, value_at
from lit_dps.report.document import CellEntry, Document, run_document
from lit_dps.storage.ownership import foreign_modules, was_run_by_user
from lit_dps.storage.read import read_study, study_uid
from lit_dps.study.retrain import check_is_new, compare_with_stored, retrain, stored_trial
from lit_dps.study.setup import StudySetup


@with_document
def main(command: CommandLine) -> Outcome:
    """Train a stored trial again, and return the exit code."""
    parser = new_parser(command, __doc__)
    add_options(parser, RetrainOptions)
    config = parser.read_command()
    options = take_options(config, RetrainOptions)
    storage = config.storage
    checkpoint = None
    if options.checkpoint:
        checkpoint = Path(options.checkpoint)

    record = read_study(storage.optuna_url, options.of, options.trust, escapes=False)
    for key, values in record.axes.items():
        check_printable(f"study.grid.{key}", values)
    stored = stored_trial(record, record.parse_cell(options.cell), options.point)
    if checkpoint is not None:
        check_is_new(checkpoint)
    if not options.trust:
        _check_trust(record, storage)
    setup = replace(_rebuilt(record), storage=storage)
    point = ", ".join(f"{key} {text_of(value)}" for key, value in stored.trial.params.items())
    line = escape(f"study {record.name}, {stored.trial}: {point}")
    print(line, file=sys.stderr, flush=True)
    attempt = retrain(setup, record, stored, checkpoint)
    if attempt.traceback:
        print(attempt.traceback, file=sys.stderr)
    if checkpoint is not None:
        if checkpoint.exists():
            print(f"checkpoint: {checkpoint}")
        else:
            print("checkpoint: none was written")
    print(escape(f"{attempt.outcome}; {compare_with_stored(attempt, stored)}"))
    document = _document(record, stored, attempt, checkpoint)
    code = ExitCode.DONE
    if attempt.status is None:
        code = ExitCode.INTERRUPTED
    elif attempt.status is Status.FAILED:
        code = ExitCode.FAILED
    return Outcome(code, document.to_dict)


def _document(
    record: StudyRecord, stored: TrialResult, attempt: Attempt, checkpoint: Path | None
) -> Document:
    """Return the document of a trial that was trained again."""
    cell = stored.trial.cell
    entry = CellEntry(
        batch_size=cell.batch_size,
        sparsity=cell.series.sparsity,
        axes=dict(cell.series.axes),
        metaparameters=dict(stored.trial.params),
        trial=stored.trial.point,
    )
    path = None
    if checkpoint is not None and checkpoint.exists():
        path = str(checkpoint)

    def examples_of(steps: int) -> float:
        counted = None
        if EXAMPLES.column not in record.metrics:
            counted = value_at(attempt.curve, EXAMPLES.column, steps)
        if counted is not None:
            return counted
        return record.examples_of(cell, steps)

    return run_document(attempt, entry, record.name, path, examples_of)


def _check_trust(record: StudyRecord, storage: StorageConfig) -> None:
    """Raise UserError if the stored configuration names modules and this user did not run the
    study."""
    # Only these keys of `study` contain class paths. Other keys have values that look like class
    # paths.
    keys = ("grid", "space", "sampler", "statistic", "readings")
    study = {key: record.config.get("study", {}).get(key) for key in keys}
    modules = foreign_modules({**record.config, "study": study})
    if modules and not was_run_by_user(study_uid(storage.optuna_url, record.name)):
        raise UserError(
            f"study {record.name!r} was run by another user or on another machine. "
            f"Training its trial again imports {shorten(', '.join(modules))}, which runs "
            "code. If you trust that code, add --trust.",
            key="--trust",
            value=False,
        )


def _rebuilt(record: StudyRecord) -> StudySetup:
    """Return the setup that a study was run with, from the configuration in its storage."""
    config = dict(record.config)
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "stored.yaml")
        Path(file).write_text(yaml.dump(config, Dumper=ConfigDumper), encoding="utf-8")
        try:
            return read_setup(["--config", file])
        except UserError as error:
            reason = str(error).replace(file, "")
            raise UserError(
                f"study {record.name!r}: its stored configuration cannot be rebuilt here "
                f"({reason}). Install the code and data that it used.",
                key="--of",
                value=record.name,
            ) from error
