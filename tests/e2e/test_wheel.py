"""A wheel has every file of the package, and its commands run without the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

import lit_dps

ROOT = Path(__file__).parents[2]
TINY = (
    "--study.batch_sizes=[8]",
    "--study.sparsities=[0]",
    "--study.trials=1",
    "--study.workers=1",
    "--goal.max_steps=40",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The folder of an unpacked wheel, built from a copy without files of earlier builds."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "lit_dps", source / "lit_dps", symlinks=True, ignore=ignored)
    shutil.copytree(ROOT / "configs", source / "configs")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, str(source), "-w", str(folder)],
        check=True,
        timeout=100,
    )
    (file,) = folder.glob("lit_dps-*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def run(wheel: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the wheel in a folder."""
    environment = {key: value for key, value in os.environ.items() if key != "LIT_DPS_DATA"}
    environment |= {"PYTHONPATH": str(wheel), "OMP_NUM_THREADS": "1"}
    environment["PYTHONDONTWRITEBYTECODE"] = ""  # the first command compiles the wheel for all
    return subprocess.run(
        [sys.executable, "-m", "lit_dps", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def package_files(folder: Path) -> set[str]:
    """Return the files below the package, also through its link to `configs`."""
    files = set()
    for parent, _, names in os.walk(folder / "lit_dps", followlinks=True):
        if Path(parent).name != "__pycache__":
            files |= {str(Path(parent, name).relative_to(folder)) for name in names}
    return files


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package(wheel):
    assert package_files(wheel) == package_files(ROOT)
    entry_points = ConfigParser()
    entry_points.read(next(wheel.glob("*.dist-info")) / "entry_points.txt")
    assert dict(entry_points["console_scripts"]) == {"lit-dps": "lit_dps.cli:main"}


@pytest.mark.slow
@pytest.mark.long  # other tests have its files, and a command of it
def test_a_study_runs_from_the_wheel_in_an_empty_folder(wheel, tmp_path):
    assert run(wheel, tmp_path, "--version").stdout == f"{lit_dps.__version__}\n"
    assert run(wheel, tmp_path, "configs", "quickstart").returncode == 0
    studied = run(wheel, tmp_path, "study", "quickstart.yaml", *TINY)
    assert studied.returncode in (0, 3), studied.stderr
    analyzed = run(wheel, tmp_path, "analyze", "quickstart.yaml")
    assert analyzed.returncode == studied.returncode, analyzed.stderr
    assert (tmp_path / "mlruns/figures/quickstart/report.html").is_file()


@pytest.mark.slow
def test_the_replication_runs_from_the_wheel(wheel, tmp_path):
    refused = run(wheel, tmp_path, "replicate", "--report_only", "true")
    assert refused.returncode == 2
    # A line on the studies of all configurations of the wheel, and the error that none is stored.
    missing, _ = refused.stderr.splitlines()
    for path in (ROOT / "configs/replication").glob("*.yaml"):
        assert repr(f"replication-{path.stem}") in missing
