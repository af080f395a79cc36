"""init: write a configuration for the module and data in a Python file.

It finds both classes and their keys, and proposes goal, budget and search by one short run.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from lit_dps.advice.code_inspection import UserCode, import_file, look_at
from lit_dps.advice.progress_run import run_progress
from lit_dps.advice.proposed_config import choose_metric, config_text, propose_goal
from lit_dps.cli.command_line import CommandLine
from lit_dps.cli.parser import new_parser
from lit_dps.cli.study import read_setup
from lit_dps.core.atomic_write import check_folder, replacing
from lit_dps.core.errors import ConfigError
from lit_dps.study.preflight.check import check_study

OPTIONS = {
    "--model": "The LightningModule, if there are several.",
    "--data": "The LightningDataModule, if there are several.",
    "--metric": "The metric of the goal; by default a loss.",
    "--batch-size-key": "The argument of the data that is the batch size.",
    "--rate-key": "The argument of the model that is the learning rate.",
    "--output": "The file to write; by default the name of FILE with .yaml.",
}


def main(command: CommandLine) -> int:
    """Write a configuration."""
    parser = new_parser(command, __doc__)
    parser.add_argument("file", type=str, metavar="FILE", help="Your Python file.")
    for option, text in OPTIONS.items():
        parser.add_argument(option, type=str, default=None, help=text)
    parser.add_argument("--seconds", type=float, default=20.0, help="Seconds of the short run.")
    config = parser.parse_args(command.words)
    file = Path(config.file)
    output = Path(config.output or f"{file.stem}.yaml")
    _check(config.seconds, output)
    module = import_file(file)
    choices = {name: config[name] for name in ("model", "data", "batch_size_key", "rate_key")}
    code = look_at(module, choices)
    _report(
        f"model {code.module.__name__} with {code.rate_key} = {code.rate:g}, data "
        f"{code.data.__name__} with {code.batch_size_key} = {code.batch_size}"
    )
    _report(f"training for {config.seconds:g} s, to see what validation logs and how fast it falls")
    run = run_progress(code.module, code.data, config.seconds)
    metric, others = choose_metric(run, config.metric)
    goal = propose_goal(run, metric)
    text = config_text(str(output), file.stem, code, run, goal, others, _examples(code))
    _report("trying the configuration")
    _try(text, output)
    with replacing(output) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(text, end="")
    print(f"\nwritten: {output}\nnext: lit-dps advise {output} --budget 10m")
    if file.parent.absolute() != Path.cwd():
        print(f"run it in {file.parent.absolute()}, or with this folder in PYTHONPATH")
    return 0


def _check(seconds: float, output: Path) -> None:
    """Raise ConfigError before anything runs, if nothing could be written later."""
    if not seconds > 0:
        raise ConfigError("--seconds", seconds, "a time above 0")
    if output.suffix not in (".yaml", ".yml"):
        raise ConfigError("--output", str(output), "a name that ends with .yaml")
    check_folder("--output", output.parent)
    if output.exists():
        raise ConfigError(
            "--output", str(output), "a file that does not exist yet", "Choose another --output."
        )


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _examples(code: UserCode) -> int | None:
    """Return the number of training examples; None if the data do not tell it."""
    data: Any = code.data()
    try:
        data.prepare_data()
        data.setup("fit")
        return len(data.train_dataloader().dataset)
    except (AttributeError, TypeError):
        return None


def _try(text: str, output: Path) -> None:
    """Check a configuration as `study` does before its first trial.

    Raises:
        UserError: if it is refused. Then nothing is written.
    """
    with tempfile.TemporaryDirectory(prefix="lit_dps-") as folder:
        file = Path(folder) / output.name
        file.write_text(text, encoding="utf-8")
        check_study(read_setup(["--config", str(file)]))
