"""study: run a study of batch sizes and sparsities, or resume it.

It measures K*, the fewest steps to the goal, in each cell, or adds cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lit_dps.analysis.analysis import Analysis
from lit_dps.cli.command_line import CommandLine
from lit_dps.cli.fit import DPSCLI
from lit_dps.cli.json_output import Outcome, with_document
from lit_dps.cli.options import StudyOptions, add_options, take_options
from lit_dps.core.config import NO_RACE, StudyConfig
from lit_dps.core.errors import ConfigError, StorageError, find_user_error
from lit_dps.core.exit_codes import ExitCode
from lit_dps.core.parse_errors import refusal
from lit_dps.core.progress_line import print_wrapped
from lit_dps.core.text import prose_for_terminal, terminal_width
from lit_dps.core.trial_config import STUDY_DEFAULTS, TRIAL_SECTIONS
from lit_dps.forecast.forecast import forecast
from lit_dps.parallel.ranks import follows_torchrun
from lit_dps.report.notebook import Study
from lit_dps.report.publish import PAGE, figures_folder
from lit_dps.report.text import parts_of
from lit_dps.storage.read import read_study, with_changed_samples
from lit_dps.study.expand_space import with_stored_space
from lit_dps.study.preflight.check import check_study
from lit_dps.study.preflight.keys import check_effects
from lit_dps.study.run import RunOptions, run_study
from lit_dps.study.setup import StudySetup
from lit_dps.training.workload import Workload


class StudyCLI(DPSCLI):
    """Parses the configuration of a study, and builds no objects: each trial builds them.

    Args:
        command: The command line.
        options: The dataclass of the options of the verb; None without options.
    """

    def __init__(self, command: CommandLine, options: type | None = None):
        self._options = options
        super().__init__(command, run=False, seed_everything_default=False)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.set_defaults(STUDY_DEFAULTS)
        if self._options is not None:
            add_options(parser, self._options)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(self.command.words)

    def instantiate_classes(self) -> None:
        """Build nothing."""

    def setup(self) -> StudySetup:
        """Return the study that the configuration describes."""
        try:
            config = self.parser.instantiate_classes(self.config)
        except (ValueError, TypeError, ArithmeticError, RuntimeError, MemoryError) as error:
            # Classes refuse values before a study begins.
            raise find_user_error(error) or refusal(error) from error
        assert isinstance(config, Namespace)
        self._check_whole_curves(config.study)
        plain: dict[str, Any] = yaml.safe_load(self.parser.dump(self.config, skip_none=False))
        workload = Workload(
            plain["model"], plain["data"], plain["trainer"], config.study.batch_size_key
        )
        sections = {name: cls(**plain[name]) for name, cls in TRIAL_SECTIONS.items()}
        return StudySetup(config.study, config.storage, workload, **sections)

    def _check_whole_curves(self, study: StudyConfig) -> None:
        """Raise ConfigError if the user sets a key that cuts curves short, and needs whole ones.

        Only the defaults of these keys give way.
        """
        if not study.whole_curves:
            return
        race_factor = self.command.value("study.race_factor")
        if study.train_past_goal and race_factor is not None:
            raise ConfigError("study.race_factor", race_factor, NO_RACE)
        if self.command.value("goal.early_reject"):
            key = "study.metrics"
            if study.train_past_goal:
                key = "study.train_past_goal"
            allowed = f"false or omitted, because {key} needs entire curves"
            raise ConfigError("goal.early_reject", True, allowed)


def read_setup(argv: Sequence[str]) -> StudySetup:
    """Return the study of a command line, without the verb: files and options."""
    return StudyCLI(CommandLine(["study", *argv])).setup()


def _document(setup: StudySetup, validate_every: int | None) -> dict[str, Any] | None:
    """Return the document of a study; None if nothing is stored, or this is no first rank."""
    if follows_torchrun():
        return None
    try:
        record = read_study(setup.storage.optuna_url, setup.study.name)
    except StorageError:  # an interruption came before the study was declared
        return None
    record = with_changed_samples(record, setup.storage.optuna_url, setup.trusts_best_of)
    study = Study(record, Analysis(record, validate_every=validate_every))
    page = figures_folder(setup.storage.folder, setup.study.name) / PAGE
    return study.to_dict(str(page) if page.is_file() else None)


@with_document
def main(command: CommandLine) -> Outcome:
    """Run or forecast a study, and return the exit code."""
    cli = StudyCLI(command, StudyOptions)
    options = take_options(cli.config, StudyOptions)
    setup = cli.setup()
    notes = check_effects(setup)
    if not follows_torchrun():
        for note in notes:
            print_wrapped(f"note: {note}")
        if options.trust:
            setup = _trusted(setup)
        setup = with_stored_space(setup, options.extend_space)
    document = partial(_document, setup, options.validate_every)
    if not options.forecast:
        run_options = RunOptions(
            show=parts_of(options.show),
            validate_every=options.validate_every,
            time_steps=options.time_steps,
            takes_over=options.take_over,
            accept_code_change=options.accept_code_change,
        )
        return Outcome(run_study(setup, run_options), document)
    if not follows_torchrun():
        check_study(setup)
        print(prose_for_terminal(forecast(setup, terminal_width())))
    return Outcome(ExitCode.DONE, document)


def _trusted(setup: StudySetup) -> StudySetup:
    """Record that the user trusts the stored studies that a study reads, and return the study."""
    for name in (setup.study.name, setup.study.best_of):
        if name is not None:
            # A study that is not stored yet has no code. Later checks report other errors.
            with suppress(StorageError):
                read_study(setup.storage.optuna_url, name, trust=True)
    return replace(setup, trusts_best_of=True)
