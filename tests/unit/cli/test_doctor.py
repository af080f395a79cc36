"""`lit-dps doctor` reports what a machine can do."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from lit_dps.cli import doctor, main
from lit_dps.cli.doctor import ERROR, OK, WARNING
from lit_dps.core.config import StorageConfig
from lit_dps.core.exit_codes import ExitCode

MAX_LINES = 15


def torch_with(gpus: int, major: int = 9):
    """Return a stand-in for PyTorch that sees some GPUs."""
    properties = SimpleNamespace(name="H200", total_memory=139 * 2**30, major=major)
    cuda = SimpleNamespace(
        is_available=lambda: gpus > 0,
        device_count=lambda: gpus,
        get_device_properties=lambda i: properties,
    )
    return SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda="13.0"))


@pytest.fixture
def gpu_count(monkeypatch):
    """Return a function that replaces PyTorch by a stand-in with some GPUs."""

    def replace(gpus: int, major: int = 9) -> None:
        monkeypatch.setitem(sys.modules, "torch", torch_with(gpus, major))

    return replace


def test_a_new_folder_has_no_error_and_nothing_is_created(tmp_path, gpu_count):
    gpu_count(0)
    storage = StorageConfig(folder=str(tmp_path / "runs"))
    checks = doctor.examine(storage)
    assert len(checks) <= MAX_LINES
    assert not [check for check in checks if check.status == ERROR]
    assert list(tmp_path.iterdir()) == []
    names = [check.name for check in checks]
    assert names[:4] == ["versions", "cores", "memory", "GPU"]
    assert names[4:] == ["storage folder", "Optuna", "MLflow"]


def test_a_missing_package_is_an_error(monkeypatch):
    def version_of(name: str) -> str:
        if name == "optuna":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(doctor, "version", version_of)
    check = doctor.versions()
    assert check.status == ERROR and "optuna" in check.result and check.remedy


def test_little_memory_is_a_warning(monkeypatch):
    for available, status in ((2**29, WARNING), (2**32, OK), (None, OK)):
        monkeypatch.setattr(doctor, "_available_bytes", lambda available=available: available)
        assert doctor.memory().status == status


def test_a_database_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    for name in ("study.db", "mlflow.db"):
        (tmp_path / name).touch()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) == tmp_path)
    here = {"folder": str(tmp_path)}
    assert doctor.optuna_storage(StorageConfig(**here)).status == ERROR
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    new = f"sqlite:///{tmp_path}/new/x.db"
    assert doctor.optuna_storage(StorageConfig(optuna=new)).status == ERROR
    assert doctor.mlflow_store(StorageConfig(mlflow=new)).status == WARNING
    assert doctor.storage_folder(StorageConfig(**here)).status == ERROR


def test_a_folder_that_may_not_be_entered_is_an_error(tmp_path, monkeypatch):
    def closed(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", closed)
    storage = StorageConfig(folder=str(tmp_path / "closed" / "runs"))
    assert doctor.storage_folder(storage).status == ERROR
    assert doctor.optuna_storage(storage).status == ERROR
    assert doctor.mlflow_store(storage).status == WARNING


def test_a_missing_optuna_or_mlflow_has_a_line(tmp_path, monkeypatch):
    for name in ("study.db", "mlflow.db"):
        (tmp_path / name).touch()
    for name in ("lit_dps.storage.read", "lit_dps.tracking.client"):
        monkeypatch.setitem(sys.modules, name, None)
    storage = StorageConfig(
        optuna=f"sqlite:///{tmp_path}/study.db", mlflow=f"sqlite:///{tmp_path}/mlflow.db"
    )
    assert doctor.optuna_storage(storage).status == ERROR
    assert doctor.mlflow_store(storage).status == WARNING


@pytest.mark.parametrize(("gpus", "lines"), [(0, 1), (2, 2), (8, 5)])
def test_each_gpu_has_a_line_up_to_a_few(gpu_count, gpus, lines):
    gpu_count(gpus)
    checks = doctor.gpus()
    assert len(checks) == lines and {check.status for check in checks} == {OK}
    if gpus:
        assert checks[0].result == "H200, 139 GiB, bf16"
    gpu_count(1, major=7)
    (old,) = doctor.gpus()
    assert old.result.endswith("no bf16")


def test_a_broken_torch_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (check,) = doctor.gpus()
    assert check.status == ERROR and check.remedy


def test_a_storage_that_is_no_folder_or_no_database_is_an_error(tmp_path):
    file = tmp_path / "file"
    file.write_text("no database")
    is_file = doctor.storage_folder(StorageConfig(folder=str(file)))
    assert is_file.status == ERROR and is_file.result.endswith(f"{file} is a file")
    check = doctor.optuna_storage(StorageConfig(optuna=f"sqlite:///{file}"))
    assert check.status == ERROR and check.remedy


def test_a_server_that_does_not_answer_is_named_without_its_password(tmp_path):
    uri = "http://user:secret@127.0.0.1:9"
    check = doctor.mlflow_store(StorageConfig(mlflow=uri))
    assert check.status == WARNING and "secret" not in check.line()


def test_the_command_prints_lines_or_one_object(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= MAX_LINES
    assert main(["doctor", "--json"]) == ExitCode.DONE
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1 and document["status"] in (OK, WARNING)
    assert len(document["checks"]) == len(lines)
    with sqlite3.connect("broken.db") as database:
        database.execute("create table studies (a)")
    words = ["doctor", "--json", "--storage.optuna", "sqlite:///broken.db"]
    assert main(words) == ExitCode.FAILED
    assert json.loads(capsys.readouterr().out)["status"] == ERROR
