"""advise: recommend batch size and devices, with time and cost of a run.

It answers for your module and data, within a budget of time.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import lit_dps.cli
from lit_dps.advice.options import Options, devices_of, seconds_of
from lit_dps.advice.result import Advice
from lit_dps.advice.run import run_advice
from lit_dps.cli.command_line import CommandLine
from lit_dps.cli.json_output import Outcome, with_document
from lit_dps.cli.options import AdviseOptions, take_options
from lit_dps.cli.study import StudyCLI
from lit_dps.core.errors import ConfigError
from lit_dps.parallel.ddp import ranks_asked
from lit_dps.parallel.ranks import started_by_torchrun


@with_document
def main(command: CommandLine) -> Outcome:
    """Give advice, and return the exit code."""
    answers: list[Advice] = []
    code = give_advice(command, answers)

    def document() -> dict[str, Any] | None:
        return answers[0].to_dict() if answers else None

    return Outcome(code, document)


def give_advice(command: CommandLine, answers: list[Advice]) -> int:
    """Give advice, append it to `answers`, and return the exit code."""
    if started_by_torchrun():
        allowed = "omitted. advise starts as many ranks as trainer.devices says"
        raise ConfigError("advise", "torchrun", allowed)
    cli = StudyCLI(command, AdviseOptions)
    written = take_options(cli.config, AdviseOptions)
    options = _parsed_options(written, ranks_asked(cli.config.trainer.as_dict()))
    proposes_max_steps = command.value("goal.max_steps") is None
    setup = cli.setup()
    return run_advice(setup, options, lit_dps.cli.began, proposes_max_steps, answers.append)


def _parsed_options(written: AdviseOptions, ranks: int) -> Options:
    """Return the options with their values parsed.

    Args:
        written: The options as the user wrote them.
        ranks: Devices of the trainer; by default the answer is for these and for one.
    """
    if written.columns is not None:
        raise ConfigError("--columns", written.columns, "omitted, because --runs is not set")
    if written.filter is not None:
        raise ConfigError("--filter", written.filter, "omitted, because --runs is not set")
    values: dict[str, Any] = {}
    names = {field.name for field in fields(Options)}
    for key, value in asdict(written).items():
        if value is not None and key in names:
            values[key] = value
    if written.budget is not None:
        values["budget"] = seconds_of(written.budget)
    values["devices"] = tuple(sorted({1, ranks}))
    if written.devices is not None:
        values["devices"] = devices_of(written.devices)
    return Options(**values)
