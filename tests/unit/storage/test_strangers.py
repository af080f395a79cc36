"""What a stranger's database, file or name cannot do: run code, fill the disk, write elsewhere, or
steer a terminal."""

from __future__ import annotations

import lzma
import subprocess
import sys
from pathlib import Path

import optuna
import pytest

import lit_dps
from lit_dps.cli import main
from lit_dps.core.config import NAME_BYTES, StudyConfig, check_name, folder_name
from lit_dps.core.errors import ConfigError, StorageError
from lit_dps.core.goal import Goal
from lit_dps.core.text import escape, escape_json
from lit_dps.core.trial import Cell
from lit_dps.report.publish import figures_folder
from lit_dps.storage.database import open_storage
from lit_dps.storage.ownership import (
    UntrustedCode,
    foreign_modules,
    remember,
    was_run_by_user,
)
from lit_dps.storage.read import open_elsewhere, read_study, study_uid
from lit_dps.storage.samplers import make_sampler
from lit_dps.tracking.client import artifact_folder
from tests.support.errors import raises_about, refuses
from tests.support.fake_study import SPACE, result, write_study

pytestmark = pytest.mark.pictures

COMMAND = "import sys; from lit_dps.cli import main; sys.exit(main())"
QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
CELL = Cell(4, 0.0)
IDENTITY = {"goal": {"error": 0.1}}
BAD_NAMES = [
    "a" * 256,
    "ä" * 120,
    "..",
    ".",
    "--help",
    "-x",
    "a\x1b[31m",
    "a\nb",
    "a.",
    "a ",
    " a",
    "a/b",
    "../../x",
    "",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_no_file_can_have_is_refused(name):
    for key, config in (
        ("study.name", StudyConfig(name=name, space=SPACE)),
        ("study.workload", None),
    ):
        with pytest.raises(ConfigError) as caught:
            (config or StudyConfig(workload=name, space=SPACE)).check()
        assert (caught.value.key, caught.value.value) == (key, name)
        assert len(str(caught.value)) < 500


def test_the_longest_name_serves():
    check_name("study.name", "ä" * (NAME_BYTES // 2))


@pytest.mark.parametrize("name", BAD_NAMES)
def test_files_of_a_study_that_has_one_already_stay_below_the_folder(name, tmp_path):
    folder = figures_folder(tmp_path, name)
    assert folder.resolve().parent == (tmp_path / "figures").resolve()
    folder.mkdir(parents=True)
    (folder / ".heat-of-the-search-and-more.png.1234567.tmp").touch()


@pytest.mark.parametrize(
    ("name", "folder"), [("my study: 2", "my_study__2"), ("-x+y.z", None), (".hidden", ".hidden")]
)
def test_names_that_serve_keep_their_folders(name, folder):
    assert folder is None or folder_name(name) == folder


def test_bad_names_do_not_share_a_folder():
    assert len({folder_name(name) for name in BAD_NAMES}) == len(BAD_NAMES)


def test_artifacts_of_an_experiment_stay_below_their_folder():
    assert artifact_folder("..") not in ("..", ".") and artifact_folder("a/../b") == "a_.._b"
    assert artifact_folder("Digits SimpleCNN") == "Digits SimpleCNN"


@pytest.mark.parametrize(
    "changed", [{"name": "../../x"}, {"name": "a\x1b[31m"}, {"workload": "../../x"}]
)
def test_merge_takes_over_no_study_of_such_a_name(changed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_study(
        "sqlite:///there.db", {CELL: [result(CELL, 0, 16)]}, **{"identity": IDENTITY, **changed}
    )
    assert main(["merge", "there.db"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "\x1b" not in said
    assert not Path("mlruns/study.db").exists()


def test_a_compressed_file_that_asks_for_too_much_memory_is_not_unpacked(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    # The header asks for a dictionary of 8 MB. A limit below that stands for a header that asks for
    # 4 GB.
    monkeypatch.setattr("lit_dps.storage.read.UNPACKING_MEMORY", 1 << 20)
    Path("greedy.db.xz").write_bytes(lzma.compress(b"SQLite format 3", preset=6))
    assert main(["merge", "greedy.db.xz"]) == 2
    said = capsys.readouterr().err
    assert "greedy.db.xz" in said and said.count("\n") == 1
    assert not Path("mlruns").exists()


def test_a_compressed_bomb_is_not_unpacked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("bomb.db.xz").write_bytes(lzma.compress(bytes(30_000_000)))
    assert main(["merge", "bomb.db.xz", "--unpacked_gb", "0.02"]) == 2
    said = capsys.readouterr().err
    assert "bomb.db.xz" in said and "0.02 GB" in said and said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["bomb.db.xz"]


@pytest.mark.parametrize("damage", [lambda x: x[:-20], lambda x: x + b"more", lambda x: b"no xz"])
def test_a_damaged_compressed_file_is_one_line(damage, tmp_path):
    (tmp_path / "a.db.xz").write_bytes(damage(lzma.compress(bytes(1000))))
    with (
        refuses(str(tmp_path / "a.db.xz"), error=StorageError),
        open_elsewhere(str(tmp_path / "a.db.xz"), ""),
    ):
        pass


def test_a_file_is_loaded_plain_and_compressed(tmp_path):
    write_study(f"sqlite:///{tmp_path}/there.db", {CELL: [result(CELL, 0, 16)]})
    (tmp_path / "there.db.xz").write_bytes(lzma.compress((tmp_path / "there.db").read_bytes()))
    for file in ("there.db", "there.db.xz"):
        assert lit_dps.load("fake", tmp_path / file).analysis.record.results[CELL][0].steps == 16


def test_no_text_of_a_database_steers_a_terminal(tmp_path):
    failed = result(
        CELL, 0, None, "failed", failure="a\x1b]0;b\x07\u202ec\n", traceback="x\n\ty\x9b"
    )
    write_study(f"sqlite:///{tmp_path}/a.db", {CELL: [failed]}, workload="w\x1b[2J")
    record = read_study(f"sqlite:///{tmp_path}/a.db", "fake")
    assert record.workload == r"w\x1b[2J"
    assert record.results[CELL][0].failure == "a\\x1b]0;b\\x07\\u202ec\n"
    assert record.results[CELL][0].traceback == "x\n\ty\\x9b"
    assert escape_json({"a\r": [1, ["b\b"]]}) == {"a\\r": [1, ["b\\x08"]]}
    assert escape("größer als 3 \xa0 µ") == "größer als 3 \xa0 µ"


FOREIGN = {
    "model": {"class_path": "planted.Net"},
    "data": {"class_path": "lit_dps.data.Digits"},
    "trainer": {},
}


def test_modules_of_a_configuration_are_known():
    config = {
        **FOREIGN,
        "study": {"grid": {"model.network": ["a.b.C", "lit_dps.models.MLP"]}},
        "x": ["0.5", "d", 1],
    }
    assert foreign_modules(config) == ["a.b", "planted"]


def test_the_modules_of_a_foreign_study_are_not_imported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    # jsonargparse changes into the configuration's folder while it imports: the path is absolute.
    Path("planted.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    Path("mlruns").mkdir()
    url = "sqlite:///mlruns/study.db"
    write_study(url, {CELL: [result(CELL, 0, 16)]}, config=FOREIGN, uid="0123")
    assert main(["fit", "--of", "fake", "--cell", "B=4"]) == 2
    said = capsys.readouterr().err
    assert "planted" in said and "--trust" in said and said.count("\n") == 1
    assert not Path("imported").exists() and "planted" not in sys.modules
    remember(study_uid(url, "fake"))  # as `study` does
    assert main(["fit", "--of", "fake", "--cell", "B=4"]) == 2
    said = capsys.readouterr().err
    assert "--trust" not in said and "planted" in said, "it is the user's own"
    assert Path("imported").exists()


def write_foreign(file: str, attribute: dict) -> None:
    """Write the study "fake" of a stranger, whose header has this attribute."""
    Path(file).parent.mkdir(exist_ok=True)
    url = f"sqlite:///{file}"
    write_study(url, {CELL: [result(CELL, 0, 16)]}, uid="0123")
    storage = optuna.storages.RDBStorage(url)
    study_id = storage.get_study_id_from_name("fake")
    stored = storage.get_study_user_attrs(study_id)
    for key, value in attribute.items():
        if isinstance(value, dict):
            value = {**stored[key], **value}
        storage.set_study_user_attr(study_id, key, value)


NAMED = {
    "rule": {"goal": {"rule": "planted.Rule"}},
    "statistic": {"statistic": "planted.Statistic"},
    "schedule": {"config": {"batch": {"schedule": "planted.Schedule"}}},
    "axis": {"axes": {"batch.schedule": ["planted.Schedule"]}},
}


@pytest.mark.parametrize("attribute", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize(
    "words",
    [
        ["analyze", "--study.name", "fake"],
        ["figures", "fake"],
        ["merge", "other.db"],
        ["replicate", "--configs", "configs", "--report_only", "true"],
        ["load"],
    ],
    ids=lambda words: words[0],
)
def test_reading_a_foreign_study_imports_nothing(words, attribute, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "planted", raising=False)
    Path("planted.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    Path("configs").mkdir()
    Path("configs/fake.yaml").write_text("study: {name: fake}")
    write_foreign("other.db" if words[0] == "merge" else "mlruns/study.db", attribute)
    if words == ["load"]:
        with pytest.raises(UntrustedCode) as caught:
            lit_dps.load("fake")
        assert (caught.value.value, caught.value.modules) == ("fake", ["planted"])
    else:
        assert main(words) == 2
        said = capsys.readouterr().err
        assert "planted" in said and "--trust" in said and said.count("\n") == 1
    assert not Path("imported").exists() and "planted" not in sys.modules

    # The module has no such class: it is imported, then refused. `merge` needs no schedule.
    if words == ["load"]:
        with pytest.raises(ConfigError):
            print(lit_dps.load("fake", trust=True).answer)
    elif words[0] == "merge" and "planted.Schedule" in str(attribute):
        assert main([*words, "--trust"]) == 0
        return
    else:
        assert main([*words, "--trust"]) == 2
    assert Path("imported").exists()
    assert was_run_by_user("0123"), "later commands trust it too"


@pytest.mark.parametrize(
    ("name", "key"), [("rule", "--study.name"), ("statistic", "--study.best_of")]
)
def test_one_option_trusts_the_stored_study_and_the_study_of_best_samples(
    key, name, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "planted", raising=False)
    Path("planted.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    write_foreign("mlruns/study.db", NAMED[name])
    words = ["study", "--config", str(QUICKSTART), key, "fake"]
    words += ["--study.batch_sizes", "[4]", "--study.sparsities", "[0.0]", "--study.trials", "1"]
    assert main(words) == 2
    assert "--trust" in capsys.readouterr().err and not Path("imported").exists()
    assert main([*words, "--trust"]) == 2  # the module has no such class
    assert "--trust" not in capsys.readouterr().err
    assert Path("imported").exists() and was_run_by_user("0123")


def test_trusted_code_reaches_the_sampler_of_a_worker_without_a_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("state").touch()  # no folder, so that nothing can be recorded
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "planted", raising=False)
    Path("planted.py").write_text(
        "from tests.support.plug_ins import LargestOfBestTwo\n"
        "class Statistic(LargestOfBestTwo): pass\n"
    )
    write_foreign("mlruns/study.db", NAMED["statistic"])
    storage = open_storage("sqlite:///mlruns/study.db")
    study = StudyConfig(name="mine", best_of="fake", space=SPACE)
    with pytest.raises(UntrustedCode):
        make_sampler(study, Goal(value=0.1)).read_other_studies(storage)
    make_sampler(study, Goal(value=0.1), trusts_best_of=True).read_other_studies(storage)
    assert "planted" in sys.modules and not was_run_by_user("0123")


def test_a_report_imports_no_module_of_the_other_study_unless_it_is_trusted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("planted_other.py").write_text(
        "from tests.support.plug_ins import LargestOfBestTwo\n"
        "class Statistic(LargestOfBestTwo):\n"
        "    def value(self, costs): return min(filter(None, costs), default=None)\n"
    )
    write_foreign("mlruns/study.db", {"statistic": "planted_other.Statistic"})
    ours = result(CELL, 0, 16, params={"model.learning_rate": 0.01})
    url = "sqlite:///mlruns/study.db"
    write_study(url, {CELL: [ours]}, "mine", config={"study": {"best_of": "fake"}})
    part = "samples of study fake have changed in 1 of 1 cells"
    assert part not in str(lit_dps.load("mine").notes) and "planted_other" not in sys.modules
    assert part in str(lit_dps.load("mine", trust=True).notes)


def test_a_class_path_has_names_only():
    """Python imports any file name, such as my-module.py, that the check cannot see."""
    with refuses("goal.rule", "planted-module.Rule"):
        Goal(value=0.1, rule="planted-module.Rule")


def test_help_ends_quietly_where_nobody_reads_on(tmp_path):
    for words in ("study --help", "configs"):
        done = subprocess.run(
            ["bash", "-c", f"{sys.executable} -c '{COMMAND}' {words} | true"],
            cwd=tmp_path, env={"PYTHONPATH": str(Path(__file__).parents[3])}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.stderr == ""


def test_many_trials_at_once_are_the_rows_of_one_after_the_other(tmp_path):
    from lit_dps.storage.bulk import add_trials

    source = f"sqlite:///{tmp_path}/source.db"
    curve = {"step": [16, 32], "val_error": [0.9, 0.5]}
    params = {key: box.at(0.5) for key, box in SPACE.items()}
    results = [result(CELL, i, 16 if i % 2 else None, params=params, curve=curve) for i in range(5)]
    write_study(source, {CELL: results})
    trials = optuna.load_study(study_name=f"fake | {CELL}", storage=source).trials
    rows = []
    for bulk in (False, True):
        storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/{bulk}.db")
        study = optuna.create_study(study_name="s", storage=storage)
        study.add_trial(trials[0])
        if bulk:
            add_trials(storage, study, trials)
        else:
            for trial in trials:
                study.add_trial(trial)
        with storage.engine.connect() as connection:
            rows.append(
                [line for line in connection.connection.iterdump() if "alembic" not in line]
            )
    assert sorted(rows[0]) == sorted(rows[1])
    assert sum("trial_params" in row and "INSERT" in row for row in rows[0]) == 12


def test_many_values_at_once_are_the_rows_of_one_after_the_other(tmp_path):
    from lit_dps.storage.bulk import add_to_trial

    attributes = {"owner": "b", "result": {"curve": {"step": [16, 32]}}}
    values = {16: 0.9, 32: 0.5, 48: float("inf")}
    rows = []
    for bulk in (False, True):
        storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/{bulk}.db")
        study = optuna.create_study(study_name="s", storage=storage)
        trial, other = study.ask(), study.ask()
        trial.set_user_attr("owner", "a")
        other.set_user_attr("owner", "c")
        if bulk:
            add_to_trial(storage, trial._trial_id, attributes, values)
        else:
            for key, value in attributes.items():
                trial.set_user_attr(key, value)
            for step, value in values.items():
                trial.report(value, step)
        stored = study.trials
        rows.append([(each.user_attrs, each.intermediate_values) for each in stored])
    assert rows[0] == rows[1] == [(attributes, values), ({"owner": "c"}, {})]
    study.tell(trial, 1.0)
    with pytest.raises(optuna.exceptions.UpdateFinishedTrialError):
        add_to_trial(storage, trial._trial_id, {"late": 1}, {})
    assert "late" not in study.trials[0].user_attrs


def test_many_trials_at_once_keep_the_space_of_the_study(tmp_path):
    from lit_dps.storage.bulk import add_trials

    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/a.db")
    study = optuna.create_study(study_name="s", storage=storage)
    wrong = [
        optuna.trial.create_trial(params={"x": x}, distributions={"x": box}, value=1.0)
        for x, box in (
            (1, optuna.distributions.IntDistribution(0, 3)),
            (0.5, optuna.distributions.FloatDistribution(0, 3)),
        )
    ]
    with raises_about(ValueError, "distribution"):
        add_trials(storage, study, wrong)
    assert not study.trials
