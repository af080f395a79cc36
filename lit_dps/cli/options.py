"""The options of verbs beside the keys of the configuration: one dataclass for each verb.

Types, defaults and help of the options are the fields and their docstrings. The parsers, the help
and the check of unknown options read them here, without an import of PyTorch.
"""

from __future__ import annotations

import argparse
import math
from argparse import SUPPRESS
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from docstring_parser import parse

from lit_dps.core.errors import ConfigError

if TYPE_CHECKING:  # its import takes time
    from jsonargparse import Namespace

OptionsT = TypeVar("OptionsT")


# Of the commands that read studies which other people may have made.
TRUST = (
    "Import modules of a foreign study. It may name them for goal and statistic. Without this "
    "option they are imported only if you ran the study."
)


@dataclass(frozen=True)
class StudyOptions:
    """Options of `study`.

    Attributes:
        forecast: Print how many trials and hours the study takes. It also prints steps and
            validations. The hours are an upper bound. An expected time needs finished trials of the
            study, or `advise` on its configuration. It times a few steps and stores nothing.
        extend_space: Widen ranges whose best values are near an end. New samples run in the added
            part, as dense as the present samples. All trials stay.
        take_over: Release trials of processes that do not answer. They may run on another host, in
            a study of an earlier version. Trials of live processes are not released.
        accept_code_change: Resume although your code or data changed. Without this option the study
            is refused. A note (--show notes) counts the trials of each version.
        show: Print also answer, cells, repeats, critical, delay, local, theory, readings, notes,
            files, all. Sections have commas between them.
        validate_every: Count a validation every N steps in all times. N is the interval of your
            training. By default times exclude validation.
        time_steps: Time the steps of all cells again, without a limit. A study times them once, at
            its end, if that takes less than 60 s or 5 % of its trials' time.
        trust: Import modules that stored studies name. The stored study and the study in
            study.best_of may name them for goal and statistic. Without this option they are
            imported only if you ran that study.
        json: Print one JSON object on stdout (docs/python.md, Document). All other text goes to
            stderr.
    """

    forecast: bool = False
    extend_space: bool = False
    take_over: bool = False
    accept_code_change: bool = False
    show: str = field(default="", metadata={"metavar": "PARTS"})
    validate_every: int | None = field(default=None, metadata={"metavar": "N"})
    time_steps: bool = False
    trust: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        check_validation_interval(self.validate_every)
        if self.json and self.forecast:
            raise ConfigError("--json", True, "omitted, because --forecast prints no JSON")


@dataclass(frozen=True)
class AdviseOptions:
    """Options of `advise`, as they are written.

    Attributes:
        budget: Maximum time, such as 90s, 30m or 2h. It counts all runs of the command together.
            Without it, "pilot" plans at most three trainings, or five on a full device.
        method: One of pilot and branch (pilot). "pilot" trains your run, then a few runs at larger
            batch sizes. "branch" forks a run; the run need not meet its goal.
        devices: Numbers of devices: 1,2,4,8. The default is 1 and the number of the trainer.
        price: Price of a device-hour, in any currency.
        bandwidth: Bytes a second between two devices. With it, advise predicts numbers of devices
            that this machine does not have.
        latency: Seconds of a message between two devices (1e-5).
        runs: Answer from existing runs, a CSV file. Nothing is trained. mlflow:EXPERIMENT reads an
            experiment.
        columns: Names of columns of --runs, such as batch_size=bs.
        filter: MLflow terms that select runs of --runs. For example: 'params."sparsity" = "0.9"'.
        json: Print one JSON object on stdout (docs/python.md, Document). All other text goes to
            stderr.
    """

    budget: str | None = None
    method: str | None = None
    devices: str | None = None
    price: float | None = None
    bandwidth: float | None = None
    latency: float | None = None
    runs: str | None = field(default=None, metadata={"metavar": "FILE"})
    columns: str | None = field(default=None, metadata={"metavar": "NAMES"})
    filter: str | None = field(default=None, metadata={"metavar": "TERMS"})
    json: bool = False


@dataclass(frozen=True)
class MasksOptions:
    """Options of `masks`.

    Attributes:
        at: Sparsities, instead of the study's. Without both, nine from 0.5 to 0.999.
        points: Samples of the search, each with other weights.
        output: Folder of tables and figures (FOLDER/figures/NAME-masks).
    """

    at: list[float] | None = None
    points: int = 3
    output: str | None = None

    def __post_init__(self) -> None:
        if self.points < 1:
            raise ConfigError("--points", self.points, "at least 1")


@dataclass(frozen=True)
class RetrainOptions:
    """Options of `fit --of`.

    Attributes:
        of: A study that has the trial, instead of FILE.
        cell: The cell of the trial, such as B=32,S=0.9. Further axes follow, such as delay=4. An
            axis with one value in the study may be omitted.
        point: Another sample of the cell than the sample of K*.
        checkpoint: Save the final weights here. The file is a Lightning checkpoint. It works
            without --of too.
        trust: Import modules of a foreign study. The stored configuration names them. Without this
            option they are imported only if you ran the study.
        json: Print one JSON object on stdout (docs/python.md, Document). All other text goes to
            stderr. It works without --of too.
    """

    of: str = field(metadata={"metavar": "STUDY"})
    cell: str = ""
    point: int | None = field(default=None, metadata={"metavar": "N"})
    checkpoint: str | None = field(default=None, metadata={"metavar": "FILE"})
    trust: bool = False
    json: bool = False


@dataclass(frozen=True)
class AnalyzeOptions:
    """Options of `analyze`.

    Attributes:
        output: Folder of the figures (FOLDER/figures/NAME).
        sync: Update MLflow. It logs missing runs, and deletes runs of trials that are not stored.
        show: Print also answer, cells, repeats, critical, delay, local, theory, readings, notes,
            files, all. Sections have commas between them.
        validate_every: Count a validation every N steps in all times. N is the interval of your
            training. By default times exclude validation.
        statistic: Another K* of the stored trials, as study.statistic. It is refused if racing
            stopped trials that determine it. Files go to a folder of this name below the figures.
        scale: Predict K at a larger size from three sizes or more. The size is an axis of the
            study, such as data.train_examples=10x or model.width=512.
        examples: Print how much loss each batch size costs in a run of N examples. The learning
            rate of the study must not decay.
        trust: Import modules of a foreign study. It may name them for goal and statistic. Without
            this option they are imported only if you ran the study.
        json: Print one JSON object on stdout (docs/python.md, Document). All other text goes to
            stderr.
    """

    output: str | None = None
    sync: bool = False
    show: str = field(default="", metadata={"metavar": "PARTS"})
    validate_every: int | None = field(default=None, metadata={"metavar": "N"})
    statistic: str | None = field(default=None, metadata={"metavar": "NAME"})
    scale: str | None = field(default=None, metadata={"metavar": "AXIS=10x"})
    examples: float | None = field(default=None, metadata={"metavar": "N"})
    trust: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        check_validation_interval(self.validate_every)
        if self.examples is not None and not 0 < self.examples < math.inf:
            raise ConfigError("--examples", self.examples, "a number above 0")
        for name in ("statistic", "scale", "examples"):
            is_set = getattr(self, name) is not None
            if is_set and self.sync:
                raise ConfigError("--sync", True, f"omitted with --{name}")
            # The document does not have the answers of the other two.
            if is_set and self.json and name != "statistic":
                raise ConfigError("--json", True, f"omitted with --{name}")


# The options of verbs that take the configuration of a study, or of `fit --of`.
OPTIONS: dict[str, type] = {
    "study": StudyOptions,
    "advise": AdviseOptions,
    "masks": MasksOptions,
    "fit": RetrainOptions,
    "analyze": AnalyzeOptions,
}


def option_of(name: str) -> str:
    """Return the option of a field: take_over -> --take-over."""
    return f"--{name.replace('_', '-')}"


def metavar_of(option: Field[Any]) -> str:
    """Return the placeholder of the value of an option in its help, such as FILE."""
    return option.metadata.get("metavar", option.name.upper())


@cache
def docs_of(cls: type) -> dict[str, str]:
    """Return the description of each attribute in the docstring of a class."""
    docs = {}
    for parameter in parse(cls.__doc__ or "").params:
        for name in parameter.arg_name.split(", "):
            docs[name] = " ".join((parameter.description or "").split())
    return docs


def add_options(parser: argparse.ArgumentParser, cls: type) -> None:
    """Add an option for each field of a dataclass to a parser.

    The options have no defaults, so they are no part of the configuration that is printed.
    """
    hints = get_type_hints(cls)
    for each in fields(cls):
        arguments: dict[str, Any] = {"default": SUPPRESS, "help": docs_of(cls)[each.name]}
        if hints[each.name] is bool:
            arguments["action"] = "store_true"
        else:
            arguments["type"] = _without_none(hints[each.name])
            arguments["metavar"] = metavar_of(each)
            arguments["required"] = each.default is MISSING
        parser.add_argument(option_of(each.name), **arguments)


def take_options(config: Namespace, cls: type[OptionsT]) -> OptionsT:
    """Remove the options of a dataclass from a parsed configuration, and return them.

    Raises:
        ConfigError: for a value that is not allowed.
    """
    options = {}
    for each in fields(cls):  # pyright: ignore[reportArgumentType]
        if each.name in config:
            options[each.name] = config.pop(each.name)
    return cls(**options)


def check_validation_interval(steps: int | None) -> None:
    """Raise ConfigError unless an interval is at least 1 step, or None."""
    if steps is not None and steps < 1:
        raise ConfigError("--validate-every", steps, "at least 1 step")


def _without_none(hint: Any) -> Any:
    """Return the type of an optional value without None."""
    types = [each for each in get_args(hint) if each is not type(None)]
    if len(types) == 1 and type(None) in get_args(hint):
        return types[0]
    return hint
