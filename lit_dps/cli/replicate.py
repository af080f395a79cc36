"""replicate: run the studies of the replication, or take them up again, and write
docs/replication.md from them.

With --full those at the paper's own scale too, which take days: they go on from the trials that the
repository holds.
"""

from __future__ import annotations

import datetime
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import yaml

from lit_dps.analysis.analysis import Analysis
from lit_dps.cli.parser import PlainParser
from lit_dps.cli.shipped import FOLDER
from lit_dps.core.atomic_write import replacing
from lit_dps.core.config import StorageConfig, StudyConfig, cores
from lit_dps.core.errors import ConfigError, StorageError
from lit_dps.core.record import StudyRecord
from lit_dps.replication.appendix import Core, Image, Machine, Part, appendix_page
from lit_dps.replication.compared import searched
from lit_dps.replication.incomplete_cells import complete_subset
from lit_dps.replication.page import replication_page, span
from lit_dps.replication.paper import compared_with
from lit_dps.report.figures import COMPARISONS, FIGURES, write_comparison
from lit_dps.report.publish import figures_folder, publish
from lit_dps.storage.merge import merge
from lit_dps.storage.read import open_elsewhere, read_study
from lit_dps.storage.urls import check_place, without_password
from lit_dps.study.hardware import cpu_model

CONFIGS = Path("configs/replication")
PAGE = "replication"  # the page, and beside it the folder of its images and of stored trials
FULL = (
    "Also the studies in the folder `full` below, of the paper's own scale. First the trials that "
    "are stored beside "
    "the page, replication/*.db.xz, are taken over."
)
_CHILD = "import sys; from lit_dps.cli import main; sys.exit(main())"


def main(argv: list[str]) -> int:
    """Runs the verb; argv[0] is "replicate". Returns the exit code of the first study that does not
    end with 0."""
    parser = PlainParser(prog="lit-dps replicate", description=__doc__)
    parser.add_argument(
        "--configs", type=str, default=str(CONFIGS), help="Folder of a file for each study."
    )
    parser.add_argument(
        "--output",
        type=str,
        default="docs",
        help=f"Folder of {PAGE}.md and, below it, its figures.",
    )
    parser.add_argument("--full", type=bool, default=False, help=FULL)
    parser.add_argument(
        "--report_only", type=bool, default=False, help="Run nothing: write the page from storage."
    )
    parser.add_class_arguments(StorageConfig, "storage")
    config = parser.instantiate_classes(parser.parse_args(argv[1:]))
    folder = Path(config.configs)
    if folder == CONFIGS and not folder.is_dir():  # not in a checkout
        folder = FOLDER / CONFIGS.name
    output, studies = Path(config.output), studies_in(folder)
    if config.full:
        studies |= studies_in(folder / "full")
        take_over(output / PAGE, config.storage)
    storage = [
        f"--storage.{key}={value}"
        for key, value in vars(config.storage).items()
        if value is not None
    ]
    if not config.report_only:
        for file in studies:
            if code := _run(["study", "--config", str(file), *storage]):
                return code
    command = " ".join(["lit-dps", *(shlex.quote(without_password(arg)) for arg in argv)])
    for path in write_pages(studies, config.storage, output, command):
        print(f"written: {path}")
    return 0


def take_over(folder: Path, storage: StorageConfig) -> None:
    """Takes over the trials of the databases in a folder, *.db.xz; those that are known already
    change nothing."""
    with ExitStack() as stack:
        others = [
            stack.enter_context(open_elsewhere(str(path), storage.optuna_url))
            for path in folder.glob("*.db.xz")
        ]
        if others:
            check_place(storage.optuna_url)
            merge(storage.optuna_url, others, None)


def studies_in(folder: Path) -> dict[Path, str]:
    """The name of each study that a folder has a configuration file of, in order of the files'
    names.

    Raises:
        ConfigError: if there is none, or a file names no study.
    """
    found = {}
    for path in sorted(folder.glob("*.yaml")):
        try:
            found[path] = yaml.safe_load(path.read_text(encoding="utf-8"))["study"]["name"]
        except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
            raise ConfigError(
                "configs", str(path), "the configuration of a study, with a study.name"
            ) from error
    if not found:
        raise ConfigError("configs", str(folder), "a folder with a .yaml file for each study")
    return found


def write_pages(
    named: dict[Path, str], storage: StorageConfig, output: Path, command: str
) -> list[Path]:
    """Writes the page, its appendix and their images from storage; a study that is not there is
    told of and left out.

    Raises:
        StorageError: if none is there.
    """
    parts, images = [], output / PAGE
    for file, name in named.items():
        try:
            record, left = complete_subset(read_study(storage.optuna_url, name))
        except StorageError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        study = Analysis(record)
        _, files = publish(
            study, figures_folder(storage.folder, f"{name} as far as measured" if left else name)
        )
        shown = _copied(
            files, [figure for figure in FIGURES if figure not in COMPARISONS], images, name
        )
        core = _core(file)
        made = f"lit-dps study --config {shlex.quote(str(file))}{_extended(study.record, core)}"
        parts.append(Part(study, made, shown, core, left))
    if not parts:
        raise StorageError("none of the studies is there: nothing to report")
    # Of several searches of a workload for one goal the widest alone is compared with others; a
    # point is no curve.
    groups: dict[str, dict[str, Part]] = {}
    for part in parts:
        if searched(record := part.study.record) and len(record.batch_sizes) > 1:
            group = groups.setdefault(compared_with(record), {})
            group[record.workload] = max(group.get(record.workload, part), part, key=span)
    comparisons = {}
    for name, group in groups.items():
        studies = [part.study for part in group.values()]
        files, _ = write_comparison(studies, figures_folder(storage.folder, f"compare {name}"))
        comparisons[name] = _copied(files, COMPARISONS, images, name)
    made = _machine(), command, datetime.date.today().isoformat()
    pages = {PAGE: replication_page, f"{PAGE}-appendix": appendix_page}
    for name, write in pages.items():
        with replacing(output / f"{name}.md") as temporary:
            temporary.write_text(write(parts, comparisons, *made), encoding="utf-8")
    return [output / f"{name}.md" for name in pages]


def _core(file: Path) -> Core:
    study = {**vars(StudyConfig()), **yaml.safe_load(file.read_text(encoding="utf-8"))["study"]}
    return Core(study["batch_sizes"], study["trials"], study["sparsities"])


def _extended(record: StudyRecord, core: Core) -> str:
    """The options that made a study larger than its configuration, as a shell takes them."""
    options = ""
    if set(record.batch_sizes) - set(core.batch_sizes):
        options += f" --study.batch_sizes '{list(record.batch_sizes)}'"
    if set(record.sparsities) - set(core.sparsities):
        options += f" --study.sparsities '{list(record.sparsities)}'"
    if record.trials > core.trials:
        options += f" --study.trials {record.trials}"
    return options


def _copied(
    files: Sequence[Path], figures: Iterable[ModuleType], folder: Path, name: str
) -> list[Image]:
    """Copies the PNG files of some figures into a folder beside the page; those of further goals
    stay behind."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = []
    own = {path.name: path for path in reversed(files) if not path.parent.name.startswith("goal-")}
    for figure in figures:
        if file := own.get(f"{figure.NAME}.png"):
            target = folder / f"{figures_folder('', name).name}-{figure.NAME}.png"
            shutil.copyfile(file, target)
            shown.append(Image(figure.CAPTION, f"{folder.name}/{target.name}", figure.NAME))
    return shown


def _machine() -> Machine:
    return Machine(cores(), cpu_model(), version("torch"))


def _run(argv: list[str]) -> int:
    """Runs a command of ours in a process of its own, whose memory is then free again; hands on
    what would end it.

    Returns:
        Its exit code, as a shell has it for one that a signal ended.
    """
    # A session of its own, or a terminal's Ctrl-C would reach it twice: from the terminal and from
    # here. With -P and this path it finds the modules that this process finds: `-c` alone would put
    # the current folder first.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    command = [sys.executable, "-P", "-c", _CHILD, *argv]
    child = subprocess.Popen(command, start_new_session=True, env=environment)
    ends = [
        s
        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(s) is not signal.SIG_IGN
    ]
    before = {s: signal.signal(s, lambda signum, frame: child.send_signal(signum)) for s in ends}
    try:
        code = child.wait()
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
    return code if code >= 0 else 128 - code
