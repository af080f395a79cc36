"""`lit-dps doctor` reports what a machine can do; the machine is a fake."""

from __future__ import annotations

import json
import sqlite3
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from lit_dps.cli import doctor, main
from lit_dps.cli.doctor import ERROR, OK, WARNING, Machine
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


def machine(tmp_path, **changes) -> Machine:
    """Return a fake machine with 8 cores, without a container and GPUs."""
    values = {
        "version_of": lambda name: "1.0",
        "import_torch": lambda: torch_with(0),
        "cgroup": tmp_path / "cgroup",
        "nvidia_device": tmp_path / "nvidia0",
        "environment": {},
        "cores": lambda: 8,
        "all_cores": lambda: 16,
    }
    return Machine(**{**values, **changes})


def test_a_new_folder_has_no_error_and_nothing_is_created(tmp_path):
    storage = StorageConfig(folder=str(tmp_path / "runs"))
    checks = doctor.examine(storage, machine(tmp_path))
    assert len(checks) <= MAX_LINES
    assert not [check for check in checks if check.status == ERROR]
    assert list(tmp_path.iterdir()) == []
    names = [check.name for check in checks]
    assert names[:4] == ["versions", "cores", "memory", "GPU"]
    assert names[4:] == ["storage folder", "Optuna", "MLflow", "data folder"]


def test_a_missing_package_is_an_error(tmp_path):
    def version_of(name: str) -> str:
        if name == "optuna":
            raise PackageNotFoundError(name)
        return "1.0"

    check = doctor.versions(machine(tmp_path, version_of=version_of))
    assert check.status == ERROR and "optuna" in check.result and check.remedy


def test_the_quota_of_a_container_limits_the_workers(tmp_path):
    cgroup = tmp_path / "cgroup"
    cgroup.mkdir()
    (cgroup / "cpu.max").write_text("250000 100000\n")
    assert doctor.cpu_quota(cgroup) == 2.5
    check = doctor.processors(machine(tmp_path, cgroup=cgroup))
    assert check.status == WARNING and check.remedy.endswith("--study.workers 2")
    (cgroup / "cpu.max").write_text("max 100000\n")
    assert doctor.processors(machine(tmp_path, cgroup=cgroup)).status == OK


def test_the_limit_of_a_container_counts_as_memory(tmp_path):
    cgroup = tmp_path / "cgroup"
    cgroup.mkdir()
    (cgroup / "memory.max").write_text(str(2**30))
    (cgroup / "memory.current").write_text(str(2**29))
    check = doctor.memory(machine(tmp_path, cgroup=cgroup))
    assert check.status == WARNING and "0.5 GiB available" in check.result


def test_page_cache_of_a_container_is_available(tmp_path):
    cgroup = tmp_path / "cgroup"
    cgroup.mkdir()
    (cgroup / "memory.max").write_text(str(8 * 2**30))
    (cgroup / "memory.current").write_text(str(8 * 2**30))
    (cgroup / "memory.stat").write_text(f"anon 1\nfile 2\ninactive_file {7 * 2**30}\n")
    assert doctor._used_bytes(cgroup) == 2**30
    (cgroup / "memory.stat").unlink()
    assert doctor._used_bytes(cgroup) == 8 * 2**30


@pytest.mark.parametrize(
    ("environment", "status"),
    [({}, WARNING), ({"CUDA_VISIBLE_DEVICES": "0"}, WARNING), ({"CUDA_VISIBLE_DEVICES": ""}, OK)],
)
def test_a_gpu_that_pytorch_does_not_see_is_a_warning(tmp_path, environment, status):
    (tmp_path / "nvidia0").touch()
    (check,) = doctor.gpus(machine(tmp_path, environment=environment))
    assert check.status == status and bool(check.remedy) is (status == WARNING)


def test_a_database_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    for name in ("study.db", "mlflow.db"):
        (tmp_path / name).touch()
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: Path(path) == tmp_path)
    here = {"folder": str(tmp_path)}
    assert doctor.optuna_storage(StorageConfig(**here)).status == ERROR
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
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
def test_each_gpu_has_a_line_up_to_a_few(tmp_path, gpus, lines):
    fake = machine(tmp_path, import_torch=lambda: torch_with(gpus))
    checks = doctor.gpus(fake)
    assert len(checks) == lines and {check.status for check in checks} == {OK}
    if gpus:
        assert checks[0].result == "H200, 139 GiB, bf16"
    (old, *_) = doctor.gpus(machine(tmp_path, import_torch=lambda: torch_with(1, major=7)))
    assert old.result.endswith("no bf16")


def test_a_broken_torch_is_an_error(tmp_path):
    def broken():
        raise OSError("libcudart.so is missing")

    (check,) = doctor.gpus(machine(tmp_path, import_torch=broken))
    assert check.status == ERROR and "libcudart.so" in check.result


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


def test_a_data_folder_that_is_set_must_exist(tmp_path):
    given = {"LIT_DPS_DATA": str(tmp_path / "none")}
    assert doctor.data_folder(machine(tmp_path, environment=given)).status == WARNING
    given = {"LIT_DPS_DATA": str(tmp_path)}
    assert doctor.data_folder(machine(tmp_path, environment=given)).status == OK


def test_the_command_prints_lines_or_one_object(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIT_DPS_DATA", raising=False)
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
