"""study: run a study, or take it up again; with --forecast, tell what that will take."""

from __future__ import annotations

import sys
from argparse import SUPPRESS
from typing import Any, get_args

import yaml
from lightning.pytorch.cli import LightningArgumentParser

from lit_dps.cli.analyze import SHOW, VALIDATE_EVERY, validation_interval
from lit_dps.cli.fit import DPSCLI
from lit_dps.cli.parser import CommandError
from lit_dps.core.config import NO_RACE, EngineName, StudyConfig
from lit_dps.core.error_origin import find_user_error
from lit_dps.core.errors import ConfigError
from lit_dps.core.parse_errors import one_line
from lit_dps.core.trial_config import TRIAL_SECTIONS
from lit_dps.forecast.forecast import forecast
from lit_dps.parallel.ranks import follows_torchrun
from lit_dps.report.text import parts_of
from lit_dps.storage.take_over import TAKE_OVER
from lit_dps.study.expand_space import OPTION as WIDEN
from lit_dps.study.expand_space import with_stored_space
from lit_dps.study.preflight.keys import check_effects
from lit_dps.study.run import RunOptions, check_study, run_study
from lit_dps.study.setup import StudySetup
from lit_dps.training.workload import Workload

TIME_STEPS = "--time-steps"
FORECAST = (
    "Run and store nothing: time a few steps and print how many trials, steps, checks and hours "
    "the study will take, "
    "and how long the paper's own protocol would."
)
TIMES = "Time the training steps of every cell again. A study times them once at its end."

WIDENS = (
    "Widen each range whose best value lies near one of its ends, in any cell, and run new points "
    "in the added part, "
    "as dense as those that are there. All trials stay."
)


ACCEPT = "--accept-code-change"
ACCEPTS = (
    "Resume a study although your code or data changed since its trials ran. Without this option "
    "the "
    "study is refused. A note below the table counts the trials of each version."
)
TAKES_OVER = (
    "Release the trials of processes that do not answer, such as those of another host in a study "
    "of an earlier "
    "version. Trials of processes that are alive are not released."
)


class StudyCLI(DPSCLI):
    """Parses the configuration of a study, which other commands take too; it builds its own objects
    for each trial."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.set_defaults({"goal.early_reject": True})  # a study keeps K, not curves
        # no default: it is no part of a configuration, and --print_config leaves it out
        parser.add_argument(
            "--engine",
            default=SUPPRESS,
            choices=get_args(EngineName),
            help="Short for --study.engine.",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        self.args = sys.argv[1:] if args is None else args

    def instantiate_classes(self) -> None:
        pass

    def setup(self) -> StudySetup:
        """The configuration as a `StudySetup`."""
        if "engine" in self.config:
            self.config.study.engine = self.config.pop("engine")
        try:  # classes refuse what they do not allow before a study begins
            init = self.parser.instantiate_classes(self.config)
        except (ValueError, TypeError, ArithmeticError, RuntimeError, MemoryError) as error:
            raise find_user_error(error) or CommandError(one_line(error)) from error
        self._check_asked(init.study)
        plain: dict[str, Any] = yaml.safe_load(self.parser.dump(self.config, skip_none=False))
        workload = Workload(
            plain["model"], plain["data"], plain["trainer"], init.study.batch_size_key
        )
        sections = {name: cls(**plain[name]) for name, cls in TRIAL_SECTIONS.items()}
        return StudySetup(init.study, init.storage, workload, **sections)

    def _check_asked(self, study: StudyConfig) -> None:
        """Refuses what was asked for and is not to be had: where whole curves are kept, defaults
        alone give way."""
        if not study.whole_curves:
            return
        asked = self.parser.parse_args(self.args, defaults=False)
        if study.train_past_goal and (race_factor := asked.get("study.race_factor")) is not None:
            raise ConfigError("study.race_factor", race_factor, NO_RACE)
        if asked.get("goal.early_reject"):
            key = "study.train_past_goal" if study.train_past_goal else "study.metrics"
            raise ConfigError(
                "goal.early_reject", True, f"false, or left out, where {key} keeps whole curves"
            )


class RunCLI(StudyCLI):
    """The command itself, with its options."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument(WIDEN, action="store_true", default=SUPPRESS, help=WIDENS)
        parser.add_argument(TAKE_OVER, action="store_true", default=SUPPRESS, help=TAKES_OVER)
        parser.add_argument("--forecast", action="store_true", default=SUPPRESS, help=FORECAST)
        parser.add_argument(ACCEPT, action="store_true", default=SUPPRESS, help=ACCEPTS)
        parser.add_argument("--show", type=str, default=SUPPRESS, help=SHOW)
        parser.add_argument("--validate-every", type=int, default=SUPPRESS, help=VALIDATE_EVERY)
        parser.add_argument(TIME_STEPS, action="store_true", default=SUPPRESS, help=TIMES)


def main(argv: list[str]) -> int:
    """Runs the verb; argv[0] is "study"."""
    sys.argv = ["lit-dps study", *argv[1:]]  # LightningCLI warns of arguments given otherwise
    cli = RunCLI(run=False, seed_everything_default=False)
    setup = cli.setup()
    notes = check_effects(setup)
    if not follows_torchrun():
        print(*(f"note: {line}\n" for line in notes), sep="", end="", file=sys.stderr)
        setup = with_stored_space(setup, cli.config.get("extend_space", False))
    if not cli.config.get("forecast"):
        options = RunOptions(
            parts_of(cli.config.get("show", "")),
            validation_interval(cli.config.get("validate_every")),
            cli.config.get("time_steps", False),
            cli.config.get("take_over", False),
            cli.config.get("accept_code_change", False),
        )
        return run_study(setup, options)
    if not follows_torchrun():
        check_study(setup)
        print(forecast(setup))
    return 0
