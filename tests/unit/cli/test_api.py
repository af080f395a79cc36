"""What a notebook sees of the package: load, run and the lazily imported names."""

import ast
import lzma
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest
import yaml

import lit_dps
from lit_dps.analysis.tables import records
from lit_dps.cli.command_line import CommandLine
from lit_dps.core.errors import StorageError, Unguarded, UserError
from lit_dps.core.exit_codes import ExitCode
from tests.e2e.commands import FAST
from tests.support.errors import raises_about, refuses
from tests.support.fake_study import law_study
from tests.support.texts import numbers_in

ROOT = Path(__file__).parents[3]
CLASSES = {
    "model": {"class_path": "lit_dps.ImageClassifier"},
    "data": {"class_path": "lit_dps.data.Digits"},
}
SHARD = ROOT / "docs" / "replication" / "studies" / "replication-mnist-momentum.db.xz"


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A study of the replication, in a folder as a study leaves it."""
    folder = tmp_path_factory.mktemp("stored")
    (folder / "study.db").write_bytes(lzma.decompress(SHARD.read_bytes()))
    return folder


def test_the_package_is_imported_in_an_instant_and_finds_its_names_when_they_are_asked_for():
    code = """
import sys
import lit_dps
heavy = {"numpy", "pandas", "matplotlib", "torch", "lightning", "mlflow", "optuna"}
print(sorted(heavy & set(sys.modules)))
lit_dps.load, lit_dps.Cell, lit_dps.Goal, lit_dps.StudyRecord
print(sorted(heavy & set(sys.modules)))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert ran.stdout == "[]\n['numpy', 'optuna', 'pandas']\n"


def test_every_public_name_is_there():
    for name in lit_dps._PUBLIC:
        assert getattr(lit_dps, name).__name__.removeprefix("lit_dps.") == name
        assert name in dir(lit_dps)
    with pytest.raises(AttributeError) as missing:
        lit_dps.fit_all  # noqa: B018
    assert missing.value.name in (None, "fit_all") and "fit_all" in str(missing.value)


def test_type_checkers_see_every_public_name():
    tree = ast.parse(Path(lit_dps.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    seen = {name.asname: node.module for node in imports for name in node.names if name.asname}
    assert seen == lit_dps._PUBLIC


def test_a_made_up_study(tmp_path):
    law_study(
        f"sqlite:///{tmp_path}/study.db", "made up", laws={0.0: (4e4, 60), 0.9: (8e4, 90)}, trials=6
    )
    study = lit_dps.load("made up", tmp_path)
    assert "'made up'" in repr(study) and numbers_in(repr(study)) == [8, 48]
    assert len(study.trials) == 48
    best = study.trials.groupby(["sparsity", "batch_size"])["steps"].min()
    assert [row["k_star"] for row in records(study.cells)] == list(best)
    dense, sparse = records(study.law)
    assert dense["c1_low"] <= dense["c1"] <= dense["c1_high"] and sparse["c1"] > dense["c1"]
    assert {4, 16, 64, 256} <= {*numbers_in(study.report)}
    assert (
        study.answer["examples"].tolist()
        == (study.answer["steps"] * study.answer["batch_size"]).tolist()
    )
    assert isinstance(study.plot(), matplotlib.figure.Figure)
    assert [ax.get_title() for ax in study.plot("scaling").axes][:2] == [
        "sparsity 0",
        "sparsity 0.9",
    ]
    assert len(study.plot("metaparameters").axes) == 8
    with refuses("name", "loss"):
        study.plot("loss")
    with refuses("name", "lipschitz"):
        study.plot("lipschitz")
    with refuses("goals", 0.05):
        study.at_goal(0.05)


def test_a_study_without_results_has_empty_tables(tmp_path):
    law_study(f"sqlite:///{tmp_path}/study.db", "none", trials=0)
    study = lit_dps.load("none", tmp_path)
    assert len(study.trials) == 0 and "learning_rate" in study.trials
    assert study.cells["k_star"].isna().all() and study.law["c1"].isna().all()


def test_a_stored_study_by_folder_or_url(stored):
    name = "replication-mnist-momentum"
    study = lit_dps.load(name, str(stored))
    assert (study.cells["k_star"] > 0).all()
    assert len(study.trials) == 100 and {*study.trials["status"]} <= {*lit_dps.Status}
    assert study.report == lit_dps.load(name, f"sqlite:///{stored}/study.db").report
    assert list(study.law["sparsity"]) == [0.0, 0.9]
    assert len(study.at_goal(0.06).plot("ratios").axes) == 1


def test_a_study_that_is_not_there_is_refused(stored):
    with refuses("study.name", "x", error=StorageError):
        lit_dps.load("x", stored)
    with refuses("nowhere/study.db", error=StorageError):
        lit_dps.load("x", "nowhere")


@pytest.mark.slow
def test_a_study_is_run_from_a_file_and_taken_up_from_a_dict(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load((ROOT / "tests" / "e2e" / "fast.yaml").read_text())
    config["study"] |= {"trials": 1, "batch_sizes": [64]}
    config["storage"] = {"folder": "here"}
    (tmp_path / "asked").mkdir()
    nested = config | {
        "data": "data.yaml",
        "study": "study.yaml",
    }  # which lie beside the file that names them
    for name, content in (("fast", nested), ("data", config["data"]), ("study", config["study"])):
        (tmp_path / "asked" / f"{name}.yaml").write_text(yaml.safe_dump(content))
    before = list(sys.argv)
    assert len(lit_dps.run("asked/fast.yaml").trials) == 2
    config["study"]["trials"] = 2
    study = lit_dps.run(config)
    assert len(study.trials) == 4
    assert study.report == lit_dps.load("fast", "here").report
    assert sys.argv == before
    with refuses("study.trials", 0, error=UserError):
        lit_dps.run(config | {"study": config["study"] | {"trials": 0}})


def test_a_script_without_a_guard_is_told_so_in_one_line(tmp_path, monkeypatch, capsys):
    import lit_dps.cli.study

    def main(command: CommandLine) -> int:  # as it ends where a worker has run the script again
        raise Unguarded

    monkeypatch.setattr(lit_dps.cli.study, "main", main)
    with pytest.raises(SystemExit) as ended:
        lit_dps.run(CLASSES | {"study": {"name": "x"}})
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "lit_dps.run" in said and said.count("\n") == 1


def test_a_study_without_a_name_is_called_after_its_file_and_a_dict_study(tmp_path, monkeypatch):
    import lit_dps.cli.study

    asked = []

    def main(command: CommandLine) -> int:
        asked.append(command.study_name)
        return ExitCode.INTERRUPTED

    monkeypatch.setattr(lit_dps.cli.study, "main", main)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(CLASSES))
    for config in ("mine.yaml", CLASSES | {"study": {"trials": 1}}, CLASSES):
        with pytest.raises(KeyboardInterrupt):
            lit_dps.run(config)
    assert asked == ["mine", "study", "study"]


def test_a_refusal_names_the_line_of_a_file_and_no_file_of_a_dict(tmp_path):
    config = yaml.safe_load(FAST.read_text())
    config["study"]["trials"] = 0.5
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(config))
    line = file.read_text().splitlines().index("  trials: 0.5") + 1
    with refuses("study.trials", 0.5) as refused:
        lit_dps.run(file)
    assert str(refused.value).endswith(f"({file}, line {line})")
    with refuses("study.trials", 0.5) as refused:
        lit_dps.run(config)
    assert "line" not in str(refused.value)


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        (lambda: lit_dps.Analysis("quickstart"), ("Analysis", "lit_dps.load('quickstart')")),
        (lambda: lit_dps.Study("quickstart"), ("Study", "lit_dps.load('quickstart')")),
        (lambda: lit_dps.Analysis(None), ("Analysis", "NoneType", "lit_dps.load")),
        (lambda: lit_dps.load(3), ("load", "int")),
        (lambda: lit_dps.load("quickstart", None), ("load", "storage", "NoneType")),
        (lambda: lit_dps.run(["mine.yaml"]), ("run", "list")),
        (lambda: lit_dps.run(None), ("run", "NoneType")),
    ],
)
def test_an_argument_of_the_wrong_type_is_refused_with_what_to_pass(call, facts):
    with raises_about(TypeError, *facts) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_a_study_in_place_of_its_record_is_refused_with_the_attribute(stored):
    study = lit_dps.load("replication-mnist-momentum", stored)
    with raises_about(TypeError, "study.analysis.record"):
        lit_dps.Analysis(study)
    with raises_about(TypeError, "analysis.record"):
        lit_dps.Study(study.analysis)
