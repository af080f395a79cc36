"""advise: recommend batch size and devices, with time and cost of a run.

It answers for your module and data, within a budget of time.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import lit_dps.cli
from lit_dps.advice.options import Options, devices_of, seconds_of
from lit_dps.advice.run import run_advice
from lit_dps.cli.command_line import CommandLine
from lit_dps.cli.options import AdviseOptions, take_options
from lit_dps.cli.study import StudyCLI
from lit_dps.core.errors import ConfigError
from lit_dps.parallel.ddp import ranks_asked
from lit_dps.parallel.ranks import started_by_torchrun


def main(command: CommandLine) -> int:
    """Give advice, and return the exit code."""
    if started_by_torchrun():
        allowed = "started without it: trainer.devices is the number of ranks that advise starts"
        raise ConfigError("advise", "torchrun", allowed)
    cli = StudyCLI(command, AdviseOptions)
    written = take_options(cli.config, AdviseOptions)
    options = _parsed_options(written, ranks_asked(cli.config.trainer.as_dict()))
    proposes_max_steps = command.value("goal.max_steps") is None
    return run_advice(cli.setup(), options, lit_dps.cli.began, proposes_max_steps)


def _parsed_options(written: AdviseOptions, ranks: int) -> Options:
    """Return the options with their values parsed.

    Args:
        written: The options as the user wrote them.
        ranks: Devices of the trainer; by default the answer is for these and for one.
    """
    if written.budget is None:
        raise ConfigError("--budget", None, "a time above 0 such as 90s, 30m or 2h")
    values: dict[str, Any] = {}
    for key, value in asdict(written).items():
        if value is not None:
            values[key] = value
    values["budget"] = seconds_of(written.budget)
    values["devices"] = tuple(sorted({1, ranks}))
    if written.devices is not None:
        values["devices"] = devices_of(written.devices)
    return Options(**values)
