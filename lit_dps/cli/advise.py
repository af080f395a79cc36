"""advise: which batch size, how many devices, how long, at what cost, for a module and data of your
own."""

from __future__ import annotations

import sys
from argparse import SUPPRESS

from lightning.pytorch.cli import LightningArgumentParser

import lit_dps.cli
from lit_dps.advice.options import Options, devices_of, seconds_of
from lit_dps.advice.run import run_advice
from lit_dps.cli.study import StudyCLI
from lit_dps.core.errors import ConfigError
from lit_dps.parallel.ranks import started_by_torchrun
from lit_dps.parallel.settings import ranks_asked

HELP = {
    "budget": (
        str,
        "Wall time that asking may take, all runs of the command together: 90s, 30m, 2h. Needed. "
        "Without goal.max_steps a short run proposes one that this time can pay.",
    ),
    "method": (
        str,
        "law (the default) probes K at a few batch sizes; branch forks a run, and needs no goal "
        "to be met.",
    ),
    "devices": (str, "Numbers of devices to answer for: 1,2,4,8. By default those of the trainer."),
    "price": (float, "Price of a device-hour, in any currency."),
    "bandwidth": (
        float,
        "Bytes a second between two devices, to predict numbers of devices that are not here.",
    ),
    "latency": (float, "Seconds of a message between two devices; 1e-5 by default."),
    "trials": (int, "Trials of each probe; 8 by default."),
}


class AdviceCLI(StudyCLI):
    """The parser of `study` with the options of advice."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        for name, (kind, text) in HELP.items():  # no defaults: they are no part of a configuration
            parser.add_argument(f"--{name}", type=kind, default=SUPPRESS, help=text)

    def sets_max_steps(self) -> bool:
        """Return whether a file or the command line sets goal.max_steps."""
        return self.parser.parse_args(self.args, defaults=False).get("goal.max_steps") is not None

    def options(self, ranks: int) -> Options:
        """Takes the options out of the configuration."""
        given = {name: self.config.pop(name) for name in HELP if name in self.config}
        if "budget" not in given:
            raise ConfigError("--budget", None, "a time above 0 such as 90s, 30m or 2h")
        given["budget"] = seconds_of(given["budget"])
        given["devices"] = (
            devices_of(given["devices"]) if "devices" in given else tuple(sorted({1, ranks}))
        )
        return Options(**given)


def main(argv: list[str]) -> int:
    """Runs the verb; argv[0] is "advise"."""
    sys.argv = ["lit-dps advise", *argv[1:]]  # LightningCLI warns of arguments given otherwise
    if started_by_torchrun():
        raise ConfigError(
            "advise", "torchrun", "started by itself: with trainer.devices it starts its own ranks"
        )
    cli = AdviceCLI(run=False, seed_everything_default=False)
    options = cli.options(ranks_asked(cli.config.trainer.as_dict()))
    proposes = not cli.sets_max_steps()
    return run_advice(cli.setup(), options, lit_dps.cli.began, proposes)
