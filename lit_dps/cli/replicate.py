"""replicate: run or resume the studies of the replication, and write its page.

With --full also the studies at the scale of the paper, which take days. They resume from the trials
that the repository holds.
"""

from __future__ import annotations

import datetime
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pandas as pd
import yaml

from lit_dps.analysis.analysis import Analysis
from lit_dps.cli.command_line import CommandLine
from lit_dps.cli.merge import merge_storages
from lit_dps.cli.options import TRUST
from lit_dps.cli.parser import new_parser
from lit_dps.cli.shipped import FOLDER
from lit_dps.core.atomic_write import replacing
from lit_dps.core.config import StorageConfig, StudyConfig, cores
from lit_dps.core.errors import ConfigError, StorageError
from lit_dps.core.record import StudyRecord
from lit_dps.replication.appendix import appendix_page
from lit_dps.replication.claims import claims_frame
from lit_dps.replication.comparable import is_search, workload_and_goal
from lit_dps.replication.incomplete_cells import complete_subset, sparse_subset
from lit_dps.replication.page import CELLS_CSV, CLAIMS_CSV, PAGE, replication_page
from lit_dps.replication.parts import Core, Image, Machine, Part, judge_parts
from lit_dps.report.figures import COMPARISONS, FIGURES, write_comparison
from lit_dps.report.figures.page_pictures import copy_small
from lit_dps.report.publish import figures_folder, publish
from lit_dps.storage.read import list_studies, read_study, with_changed_samples
from lit_dps.storage.stored_format import OtherFormat
from lit_dps.storage.urls import check_place, sqlite_file, without_password
from lit_dps.study.hardware import cpu_model

CONFIGS = Path("configs/replication")
STUDIES = "studies"  # the folder of stored trials, below the folder of the images
FULL = (
    "Also the studies in the folder `full` below, at the scale of the paper. They take days; "
    "--report_only true runs none. First the trials that are stored beside the page, "
    "replication/studies/*.db.xz, are merged."
)
_CHILD = "import sys; from lit_dps.cli import main; sys.exit(main())"
_FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(command: CommandLine) -> int:
    """Run the studies, and write the pages.

    Returns:
        The exit code of the first study that does not end with 0; else 0.
    """
    parser = new_parser(command, __doc__)
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
    parser.add_argument("--trust", action="store_true", help=TRUST)
    config = parser.read_command()
    folder = Path(config.configs)
    if folder == CONFIGS and not folder.is_dir():  # not in a checkout
        folder = FOLDER / CONFIGS.name
    output = Path(config.output)
    studies = studies_in(folder)
    if config.full:
        studies |= studies_in(folder / "full")
        take_over(output / PAGE, config.storage, config.trust)
    if not config.report_only:
        code = _run_studies(studies, config.storage)
        if code:
            return code
    words = [shlex.quote(without_password(word)) for word in command.argv]
    command_line = " ".join(["lit-dps", *words])
    for path in write_pages(studies, config.storage, output, command_line, config.trust):
        print(f"written: {path}")
    return 0


def take_over(folder: Path, storage: StorageConfig, trust: bool = False) -> None:
    """Merge the trials of the files studies/*.db.xz of a folder; stored ones change nothing.

    The file that is named as its study comes before files with further trials of the study, whose
    names continue the name. So the study keeps the header of the first file.
    """
    files = sorted((folder / STUDIES).glob("*.db.xz"), key=lambda path: path.name.split(".db")[0])
    databases = [str(path) for path in files]
    if databases:
        check_place(storage.optuna_url)
        merge_storages(storage.optuna_url, databases, None, trust=trust)


def studies_in(folder: Path) -> dict[Path, str]:
    """Return the names of the studies that a folder has configurations of, by file, in order.

    Raises:
        ConfigError: If the folder has no configuration, or a file names no study.
    """
    names = {}
    for path in sorted(folder.glob("*.yaml")):
        try:
            names[path] = yaml.safe_load(path.read_text(encoding="utf-8"))["study"]["name"]
        except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
            raise ConfigError(
                "configs", str(path), "the configuration of a study, which has a study.name"
            ) from error
    if not names:
        raise ConfigError("configs", str(folder), "a folder with a .yaml file for each study")
    return names


def write_pages(
    studies: Mapping[Path, str],
    storage: StorageConfig,
    output: Path,
    command: str,
    trust: bool = False,
) -> list[Path]:
    """Write the page, its appendix and their images from storage.

    A study that is not stored is reported, and is not on the pages.

    Args:
        studies: The names of the studies, by configuration file.
        storage: Where they are stored.
        output: The folder of the pages.
        command: What writes the pages, in a shell.
        trust: As in `read_study`.

    Returns:
        The paths of the pages.

    Raises:
        StorageError: If no study is stored.
        ConfigError: If a study has the name of the `sparse_subset` of another one.
    """
    images = output / PAGE
    parts = []
    url = storage.optuna_url
    stored: list[str] = []
    path = sqlite_file(url)
    if path is None or path.is_file():
        stored = list_studies(url)
    missing = [repr(name) for name in studies.values() if name not in stored]
    if missing:
        print(
            f"left out, not in {without_password(url)}: {', '.join(missing)}. Run them, or copy "
            f"stored trials (*.db.xz) to {images / STUDIES} and use --full true --report_only "
            "true. Without --report_only true, --full true also runs studies that take days.",
            file=sys.stderr,
        )
    for file, name in studies.items():
        if name not in stored:
            continue
        try:
            record = read_study(storage.optuna_url, name, trust)
        except OtherFormat:
            raise
        except StorageError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        record = with_changed_samples(record, storage.optuna_url, trust)
        parts.append(_part(record.name, complete_subset(record), file, storage, images))
        sparse = sparse_subset(record)
        if sparse is not None:
            subset_name = sparse[0].name
            if subset_name in studies.values():
                allowed = f"another name, because a part of study {name} has this name"
                raise ConfigError("study.name", subset_name, allowed)
            part = _part(subset_name, sparse, file, storage, images)
            parts.append(replace(part, is_subset=True))
    if not parts:
        raise StorageError(
            "the storage has no study of the replication. Run one of its configurations, "
            "such as lit-dps study --config FILE."
        )
    comparisons = {}
    for name, group in _comparable_parts(parts).items():
        folder = figures_folder(storage.folder, f"compare {name}")
        files, _ = write_comparison([part.study for part in group], folder)
        comparisons[name] = []
        for image in _copy_figures(files, COMPARISONS, images, name, group[0].study):
            drawn = image._replace(studies=_drawn_studies(image.name, group))
            comparisons[name].append(drawn)
    claims_frame(judge_parts(parts)).to_csv(images / CLAIMS_CSV, index=False, float_format="%.5g")
    cells = pd.concat([part.study.table.assign(study=part.name) for part in parts])
    cells.to_csv(images / CELLS_CSV, index=False, float_format="%.5g")
    machine = Machine(cores(), cpu_model(), version("torch"))
    date = datetime.date.today().isoformat()
    paths = []
    for name, write in ((PAGE, replication_page), (f"{PAGE}-appendix", appendix_page)):
        path = output / f"{name}.md"
        with replacing(path) as temporary:
            text = write(parts, comparisons, machine, command, date)
            temporary.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def _part(
    study_name: str,
    complete: tuple[StudyRecord, str],
    file: Path,
    storage: StorageConfig,
    images: Path,
) -> Part:
    """Return a study as part of the pages, after copying its figures into a folder.

    Args:
        study_name: The name of the study.
        complete: Its complete cells, and the others as text.
        file: Its configuration.
        storage: Its storage, where the figures are written.
        images: The folder that they are copied into.
    """
    subset, incomplete = complete
    study = Analysis(subset)
    name = study_name
    if incomplete:
        name += " as far as measured"
    _, files = publish(study, figures_folder(storage.folder, name))
    figures = [figure for figure in FIGURES if figure not in COMPARISONS]
    shown = _copy_figures(files, figures, images, study_name, study)
    core = _core(file)
    command = f"lit-dps study --config {shlex.quote(str(file))}{_extending_options(subset, core)}"
    return Part(study, command, shown, core, incomplete)


def _comparable_parts(parts: Iterable[Part]) -> dict[str, list[Part]]:
    """Return the searches with a curve that are drawn in one figure, by what they share.

    Of several searches of one workload for one goal, only the widest.
    """
    groups: dict[str, dict[str, Part]] = {}
    for part in parts:
        record = part.study.record
        if is_search(record) and len(record.batch_sizes) > 1:
            group = groups.setdefault(workload_and_goal(record), {})
            other = group.get(record.workload)
            if other is None or part.width > other.width:
                group[record.workload] = part
    return {name: list(group.values()) for name, group in groups.items()}


def _drawn_studies(figure_name: str, group: Sequence[Part]) -> tuple[str, ...]:
    """Return the names of the compared studies that a figure draws."""
    figures = {figure.NAME: figure for figure in COMPARISONS}
    figure = figures[figure_name]
    drawn = set(figure.rows(*[part.study for part in group])["study"])
    return tuple(part.name for part in group if part.study.record.name in drawn)


def _core(file: Path) -> Core:
    """Return what a configuration asks for."""
    study = {**vars(StudyConfig()), **yaml.safe_load(file.read_text(encoding="utf-8"))["study"]}
    return Core(study["batch_sizes"], study["trials"], study["sparsities"])


def _extending_options(record: StudyRecord, core: Core) -> str:
    """Return the shell options that made a study larger than its configuration."""
    options = ""
    if set(record.batch_sizes) - set(core.batch_sizes):
        options += f" --study.batch_sizes '{list(record.batch_sizes)}'"
    if set(record.sparsities) - set(core.sparsities):
        options += f" --study.sparsities '{list(record.sparsities)}'"
    if record.trials > core.trials:
        options += f" --study.trials {record.trials}"
    return options


def _copy_figures(
    files: Sequence[Path],
    figures: Iterable[ModuleType],
    folder: Path,
    name: str,
    study: Analysis,
) -> list[Image]:
    """Copy the PNG files of some figures into a folder, without files of further goals.

    Args:
        files: What was written of the study, or of the compared studies.
        figures: The figures.
        folder: Beside the page.
        name: Of the study or the comparison, which the copies' names begin with.
        study: The study, or one of the compared ones, which have one unit of K*.
    """
    folder.mkdir(parents=True, exist_ok=True)
    by_name: dict[str, Path] = {}
    for path in files:
        if not path.parent.name.startswith("goal-"):
            by_name.setdefault(path.name, path)
    images = []
    for figure in figures:
        file = by_name.get(f"{figure.NAME}.png")
        if file is not None:
            target = folder / f"{figures_folder('', name).name}-{figure.NAME}.png"
            copy_small(file, target)
            caption = figure.CAPTION
            if hasattr(figure, "caption_in"):
                caption = figure.caption_in(study.record.goal.cost_unit)
            images.append(Image(caption, f"{folder.name}/{target.name}", figure.NAME))
    return images


def _run_studies(files: Iterable[Path], storage: StorageConfig) -> int:
    """Run studies one after another. Returns the first exit code that is not 0, else 0."""
    options = []
    for key, value in vars(storage).items():
        if value is not None:
            options.append(f"--storage.{key}={value}")
    for file in files:
        code = _run(["study", "--config", str(file), *options])
        if code:
            return code
    return 0


def _run(argv: list[str]) -> int:
    """Run a command of ours in a separate process, whose memory is free afterwards.

    Signals that would end this process are forwarded to it.

    Returns:
        Its exit code; 128 + the number of the signal that ended it, as in a shell.
    """
    # -P and this path: the child finds the modules that this process finds. `-c` alone would put
    # the current folder first.
    search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    # In the terminal's session it would receive Ctrl-C twice: from the terminal and from here.
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", _CHILD, *argv],
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": search_path},
    )

    def forward(signum: int, frame: object) -> None:
        child.send_signal(signum)

    handlers = {}
    for number in _FORWARDED_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            handlers[number] = signal.signal(number, forward)
    try:
        code = child.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if code < 0:
        return 128 - code
    return code
