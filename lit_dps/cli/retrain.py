"""fit --of: trains a trial of a stored study again, that of K* unless another is asked for, and may
keep its weights.

The goal, seeds, data order, mask and threads are the trial's own: K is equal to the stored one.
Nothing is stored.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import yaml
from jsonargparse import Namespace

from lit_dps.cli.parser import PlainParser
from lit_dps.cli.study import StudyCLI
from lit_dps.core.aliases import from_stored
from lit_dps.core.config import StorageConfig
from lit_dps.core.errors import ConfigError, UserError
from lit_dps.core.record import StudyRecord
from lit_dps.core.text import shorten
from lit_dps.core.trial import Status, text_of
from lit_dps.parallel.process import INTERRUPTED
from lit_dps.storage.ownership import foreign_modules, is_own
from lit_dps.storage.read import read_study, study_uid
from lit_dps.study.retrain import compare_with_stored, retrain, stored_trial
from lit_dps.study.setup import StudySetup

TRUST = (
    "Import the modules that the stored configuration names, even if somebody else ran the study."
)


def main(argv: list[str]) -> int:
    """Runs the verb; argv[0] is "fit"."""
    asked = _asked(argv[1:])
    storage, keep = (
        StorageConfig(**asked.storage.as_dict()),
        asked.checkpoint and Path(asked.checkpoint),
    )
    record = read_study(storage.optuna_url, asked.of)
    stored = stored_trial(record, record.parse_cell(asked.cell), asked.point)
    if keep is not None and keep.exists():
        raise ConfigError("--checkpoint", str(keep), "a file that is not there yet")
    if not asked.trust:
        _check_trust(record, storage)
    setup = _rebuilt(record, storage)
    point = ", ".join(f"{key} {text_of(value)}" for key, value in stored.trial.params.items())
    print(f"study {record.name}, {stored.trial}: {point}", file=sys.stderr, flush=True)
    run = retrain(setup, record, stored, keep)
    if run.traceback:
        print(run.traceback, file=sys.stderr)
    if keep is not None:
        print(f"checkpoint: {keep if keep.exists() else 'none was written'}")
    print(f"{run.outcome}; {compare_with_stored(run, stored)}")
    return INTERRUPTED if run.status is None else int(run.status is Status.FAILED)


def _asked(argv: list[str]) -> Namespace:
    parser = PlainParser(prog="lit-dps fit", description=__doc__)
    parser.add_argument("--of", type=str, required=True, help="The study.")
    parser.add_argument(
        "--cell",
        type=str,
        default="",
        help="The cell, such as B=32,S=0.9,delay=4; what has one value in the study may be left "
        "out.",
    )
    parser.add_argument("--point", type=int, help="Another point of the cell than that of K*.")
    parser.add_argument(
        "--checkpoint", type=str, help="Save a Lightning checkpoint of the weights at the end here."
    )
    parser.add_argument("--trust", action="store_true", help=TRUST)
    parser.add_class_arguments(StorageConfig, "storage")
    return parser.parse_args(argv)


def _check_trust(record: StudyRecord, storage: StorageConfig) -> None:
    """Raise UserError if the stored configuration names modules and this user did not run the
    study."""
    # Only these keys of `study` contain class paths. Other keys have values that look like class
    # paths.
    study = {key: record.config.get("study", {}).get(key) for key in ("grid", "space", "sampler")}
    modules = foreign_modules({**record.config, "study": study})
    if modules and not is_own(study_uid(storage.optuna_url, record.name)):
        raise UserError(
            f"study {record.name!r} was not run by you on this machine, and training its trial "
            "again imports "
            f"{shorten(', '.join(modules))}, which runs code; add --trust if you trust that code"
        )


def _rebuilt(record: StudyRecord, storage: StorageConfig) -> StudySetup:
    """The setup that a study was run with, from the configuration that is stored with it."""
    before, file = sys.argv, None
    try:
        with tempfile.NamedTemporaryFile(
            "w", suffix=".yaml", encoding="utf-8", delete=False
        ) as file:
            yaml.safe_dump(from_stored(record.config), file)
        sys.argv = [
            "lit-dps fit",
            "--config",
            file.name,
        ]  # LightningCLI warns of arguments given otherwise
        setup = StudyCLI(run=False, seed_everything_default=False).setup()
    except UserError as error:
        why = str(error).replace(file.name, "") if file else error
        raise UserError(
            f"study {record.name!r}: its stored configuration cannot be rebuilt here: {why}"
        ) from error
    finally:
        sys.argv = before
        if file is not None:
            os.unlink(file.name)
    return StudySetup(**{**vars(setup), "storage": storage})
