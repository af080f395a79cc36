"""calibration: show how well advice predicted the runs of `fit` after it.

It reads the storage alone, and needs no PyTorch.
"""

from __future__ import annotations

from lit_dps.advice.prediction import calibrate
from lit_dps.cli.command_line import CommandLine
from lit_dps.cli.parser import new_parser
from lit_dps.core.text import escape
from lit_dps.storage.advice_store import list_advice


def main(command: CommandLine) -> int:
    """Print predictions of advice beside the outcomes."""
    parser = new_parser(command, __doc__)
    config = parser.read_command()
    outcomes = {}
    for name, advice in list_advice(config.storage.optuna_url).items():
        outcomes[name] = advice.get("outcomes", [])
    print(escape(calibrate(outcomes)), end="")
    return 0
