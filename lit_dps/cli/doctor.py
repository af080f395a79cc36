"""doctor: check what this machine and its storage can do, with remedies.

Each line is ok, a warning or an error. An error gives exit code 1. Nothing is created.
"""

from __future__ import annotations

from lit_dps.cli.command_line import CommandLine
from lit_dps.cli.json_output import print_document, stdout_on_stderr
from lit_dps.cli.parser import new_parser
from lit_dps.core.exit_codes import ExitCode
from lit_dps.core.text import escape, for_terminal
from lit_dps.study.doctor import ERROR, examine, worst

SCHEMA = 1  # of the JSON object
STATUS_CHARACTERS = 9  # before the name of a check
JSON = "Print one JSON object: schema, status (the worst), and checks with name, status, result "
JSON += "and remedy."


def main(command: CommandLine) -> int:
    """Print the checks, and return the exit code."""
    parser = new_parser(command, __doc__)
    parser.add_argument("--json", action="store_true", help=JSON)
    config = parser.read_command()
    with stdout_on_stderr():
        checks = examine(config.storage)
    status = worst(checks)
    if config.json:
        rows = [check._asdict() for check in checks]
        print_document({"schema": SCHEMA, "status": status, "checks": rows})
    else:
        for check in checks:
            print(for_terminal(escape(check.line()), " " * STATUS_CHARACTERS))
    return ExitCode.FAILED if status == ERROR else ExitCode.DONE
