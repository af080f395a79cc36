"""Studies of format 1 are refused with the command that converts them. Converting loses nothing."""

from __future__ import annotations

import lzma
import os
import pprint
import socket
import subprocess
import sys

import optuna
import pytest
from optuna.storages._rdb.models import StudyUserAttributeModel
from sqlalchemy import delete
from sqlalchemy.orm import Session

from lit_dps.api import load
from lit_dps.cli import main
from lit_dps.core.attempt import Attempt, AttemptRules
from lit_dps.core.config import StudyConfig
from lit_dps.core.errors import StorageError
from lit_dps.core.goal import Goal
from lit_dps.core.search_space import ExpandedSpace, Range
from lit_dps.core.trial import Cell, Status, TrialResult
from lit_dps.storage import schema
from lit_dps.storage.advice_store import AdviceStore, list_advice
from lit_dps.storage.columns import decode_columns, encode_columns
from lit_dps.storage.database import temporary_storage
from lit_dps.storage.format_1 import convert_header, convert_result, convert_trial
from lit_dps.storage.header import check_unchanged, declare
from lit_dps.storage.locks import Liveness, peers
from lit_dps.storage.migrate import (
    StudyInUse,
    liveness_without_token,
    migrate,
    start_of,
)
from lit_dps.storage.read import list_studies, read_study
from lit_dps.storage.run_records import begin_run, store_environment
from lit_dps.storage.samplers import SobolSampler
from lit_dps.storage.stored_format import OtherFormat
from lit_dps.storage.trial_queue import TrialQueue
from tests.e2e.commands import environment
from tests.support.former_format import dump, to_former_format

SPACE = {"model.learning_rate": Range(1e-3, 1.0, "log")}
GOAL = Goal(0.1, 16, 320)
IDENTITY = {"goal": {"error": 0.1}, "study": {"seed": 3}}
ENVIRONMENT = {"key": "abc", "since": "2026-11-27 10:00", "python": "3.11", "sources": {"a": ["1"]}}


def config(name: str = "s", **options) -> StudyConfig:
    grid = {"model.width": [8, 16]}
    given = {"batch_sizes": [4, 8], "sparsities": [0.0], "trials": 3, "seed": 3, "repeats": 1}
    return StudyConfig(name=name, space=SPACE, grid=grid, goals=[0.3], **{**given, **options})


def finish(attempt: Attempt) -> TrialResult:
    """A result with every kind of stored value."""
    trial = attempt.trial
    status = (Status.COMPLETE, Status.INFEASIBLE, Status.FAILED)[trial.point % 3]
    steps = 160 if status is Status.COMPLETE else None
    shares = [(6000 - 37 * i) / 6000 for i in range(1, 11)]
    losses = [1 / (i + 3) for i in range(1, 11)]
    if status is Status.INFEASIBLE:
        losses[-1], shares[-1] = float("nan"), float("inf")
    curve = {
        "step": list(range(16, 161, 16)),
        "val_error": shares,
        "exact": [0] * 4 + [1] * 6,
        "train_loss": losses,
    }
    return TrialResult(
        trial,
        status,
        steps,
        curve,
        {"w": (3, 30)},
        1.5,
        readings={"lipschitz": {"step": [16, 48], "lipschitz": [0.123456789, float("inf")]}},
        flags={"short_steps": 2, "theory/loss": 2.3, "theory/floor": float("nan")},
        failure="no" if status is Status.FAILED else "",
        traceback="Traceback" if status is Status.FAILED else "",
        timed={"steps": 10, "training": 0.25},
        engine="single",
    )


def make_study(url: str, name: str = "s", claims: int = 0) -> TrialQueue:
    """Write a study with finished trials, repeats and advice, as the present version stores it."""
    study = config(name)
    boxes = [ExpandedSpace(3, 4, {"model.learning_rate": Range(1e-4, 1.0, "log")})]
    stored = {"study": {"race_factor": 2.0, "train_past_goal": False, "trials": 3}}
    declared = declare(url, study, "w", GOAL, IDENTITY, stored, boxes)
    run = begin_run(url, name)
    store_environment(url, name, ENVIRONMENT)
    store = TrialQueue(
        url,
        name,
        study.cells,
        study.trials,
        SobolSampler(SPACE, 3),
        3,
        AttemptRules(GOAL, study.goals),
        study.race_factor,
        uid=declared.uid,
        run_number=run,
        repeat_plan=study.repeat_plan,
        environment="abc",
    )
    finished = 0
    while (attempt := store.claim_next()) is not None and finished < 14:
        store.store_result(finish(attempt))
        finished += 1
    store.release_claims()
    for _ in range(claims):
        store.claim_next()
    advice = AdviceStore(url, name)
    advice.keep(configuration=IDENTITY, spent=3.0, branches=[{"step": 3}], branch_scaled=True)
    advice.append("outcomes", {"devices": 1, "other_hours": 0.1, "real_devices": 1, "hours": 2.0})
    return store


def everything(url: str) -> str:
    """All that can be read of a storage, as text, because nan equals nothing."""
    records = [read_study(url, name) for name in list_studies(url)]
    return "\n".join(map(as_text, [*records, list_advice(url)]))


def as_text(value) -> str:
    """A value as text; the order of keys does not count."""
    return pprint.pformat(value, width=10_000, sort_dicts=True)


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/study.db"


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def any_url(request, url):
    return request.getfixturevalue("postgres") if request.param == "postgres" else url


@pytest.mark.parametrize(
    "any_url", ["sqlite", pytest.param("postgres", marks=pytest.mark.long)], indirect=True
)
def test_everything_reads_back_as_before(any_url):
    for name in ("s", "t"):
        make_study(any_url, name).leave()
    before = everything(any_url)
    to_former_format(any_url)
    with pytest.raises(OtherFormat):
        read_study(any_url, "s")
    done = migrate(any_url)
    assert done.converted.keys() == {"s", "t"} and min(done.converted.values()) > 10
    assert everything(any_url) == before
    with temporary_storage(any_url) as storage:
        for study in storage.get_all_studies():
            if " | " in study.study_name:
                schema.check_keys(study.user_attrs, schema.CELL_ATTRS)
    # The study resumes under the same configuration, and its points are the same.
    check_unchanged(any_url, "s", IDENTITY, config())
    again = migrate(any_url)
    assert again.converted == {} and again.unchanged == ["s", "t"] and again.backup is None


def test_only_the_advice_of_a_study_may_have_the_former_format(url):
    make_study(url).leave()
    before = everything(url)
    with temporary_storage(url) as storage, Session(storage.engine) as session, session.begin():
        session.execute(
            delete(StudyUserAttributeModel).where(
                StudyUserAttributeModel.key == schema.ADVICE_FORMAT
            )
        )
    done = migrate(url)
    assert everything(url) == before
    assert done.converted == {"s": 0}


def test_names_of_studies_that_differ_in_case_are_two_names(url):
    """Cells of the first versions have no uid, so their name alone says whose they are."""
    for name in ("s", "S"):
        make_study(url, name).leave()
    before = as_text(read_study(url, "s"))
    to_former_format(url)
    with temporary_storage(url) as storage, Session(storage.engine) as session, session.begin():
        attribute = StudyUserAttributeModel
        session.execute(delete(attribute).where(attribute.key == schema.UID))
    own_trial(url, "elsewhere:7:12", "S")
    assert migrate(url, only="s").converted == {"s": 15}
    done = migrate(url, take_over=True)
    assert done.converted == {"S": 16} and done.unchanged == ["s"]
    assert as_text(read_study(url, "s")) == before


@pytest.mark.long
def test_a_sqlite_file_is_copied_first(url, tmp_path):
    make_study(url).leave()
    make_study(url, "t").leave()
    to_former_format(url)
    before = dump(tmp_path / "study.db")
    done = migrate(url, only="t")
    assert done.backup == tmp_path / "study.db.format-1"
    assert dump(done.backup) == before
    assert list(done.converted) == ["t"]
    with pytest.raises(OtherFormat):
        read_study(url, "s")
    assert migrate(url).backup == tmp_path / "study.db.format-1-2"
    with pytest.raises(StorageError):
        migrate(url, only="none")
    with pytest.raises(StorageError):
        migrate(f"sqlite:///{tmp_path}/missing.db")
    assert not (tmp_path / "missing.db").exists()


def test_a_newer_format_is_refused(url, tmp_path):
    make_study(url).leave()
    with temporary_storage(url) as storage:
        header = optuna.load_study(study_name="s", storage=storage)
        header.set_user_attr(schema.FORMAT_ATTR, schema.FORMAT + 1)
    before = dump(tmp_path / "study.db")
    with pytest.raises(OtherFormat) as caught:
        migrate(url)
    assert caught.value.stored_format == schema.FORMAT + 1
    assert dump(tmp_path / "study.db") == before


REFUSED = [
    ("analyze", "--study.name=s"),
    ("figures", "s"),
    ("calibration",),
    ("fit", "--of", "s", "--cell", "B=4,S=0"),
    ("replicate", "--report_only", "true", "--configs", "configs"),
]


@pytest.mark.parametrize("argv", REFUSED, ids=lambda argv: argv[0])
def test_every_verb_refuses_the_former_format_and_creates_nothing(
    argv, tmp_path, monkeypatch, capsys
):
    (tmp_path / "mlruns").mkdir()
    url = f"sqlite:///{tmp_path}/mlruns/study.db"
    make_study(url).leave()
    to_former_format(url)
    (tmp_path / "mlruns" / "study.db.lock").unlink()
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "one.yaml").write_text("study: {name: s}")
    before = dump(tmp_path / "mlruns" / "study.db")
    files = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lit-dps", *argv])
    assert main(list(argv)) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "--storage sqlite:///mlruns/study.db" in message
    assert dump(tmp_path / "mlruns" / "study.db") == before
    assert sorted(tmp_path.rglob("*")) == files


def test_load_merge_and_study_refuse_the_former_format(url, tmp_path):
    make_study(url).leave()
    to_former_format(url)
    before = dump(tmp_path / "study.db")
    for refused in (
        lambda: load("s", tmp_path / "study.db"),
        lambda: check_unchanged(url, "s", IDENTITY, config()),
        lambda: declare(url, config(), "w", GOAL, IDENTITY, {}),
        lambda: AdviceStore(url, "s").read(),
        lambda: AdviceStore(url, "s").keep(spent=1.0),
    ):
        with pytest.raises(OtherFormat) as caught:
            refused()
        assert caught.value.stored_format == 1
    assert dump(tmp_path / "study.db") == before
    assert main(["merge", str(tmp_path / "study.db"), "--storage.optuna", f"{url}.new"]) == 2
    assert not (tmp_path / "study.db.new").exists()


def test_a_compressed_file_becomes_a_new_file(url, tmp_path, capsys):
    make_study(url).leave()
    before = everything(url)
    to_former_format(url)
    packed = tmp_path / "old.db.xz"
    packed.write_bytes(lzma.compress((tmp_path / "study.db").read_bytes()))
    former = packed.read_bytes()
    assert main(["migrate", "--storage", str(packed)]) == 0
    new = tmp_path / "old-format-2.db.xz"
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and str(new) in lines[1]
    assert packed.read_bytes() == former
    (tmp_path / "new.db").write_bytes(lzma.decompress(new.read_bytes()))
    assert everything(f"sqlite:///{tmp_path}/new.db") == before


WORK = """
import sys, time
from lit_dps.storage.locks import peers
shared = peers(sys.argv[1])
with shared.lock("storage"):
    shared.owner
print("works", flush=True)
time.sleep(600)
"""


def test_a_storage_is_not_converted_while_a_process_works_on_it(any_url):
    make_study(any_url, claims=1).leave()
    to_former_format(any_url)
    argv = [sys.executable, "-c", WORK, any_url]
    other = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        other.stdout.readline()
        with pytest.raises(StudyInUse) as caught:
            migrate(any_url)
        assert len(caught.value.processes) == 1
    finally:
        other.kill()
        other.wait()
    migrate(any_url)


def own_trial(url: str, owner: str, name: str = "s") -> None:
    """Let a process of the first versions run the trial of the study that waits."""
    with temporary_storage(url) as storage:
        study = optuna.load_study(study_name=schema.cell_study_name(name, CELL), storage=storage)
        claimed = study.ask()
        claimed.set_user_attr(schema.POINT_ATTR, 7)
        claimed.set_user_attr(schema.OWNER, owner)


CELL = Cell(4, 0.0, (("model.width", 8),))


def test_owners_of_the_first_versions(url):
    make_study(url).leave()
    to_former_format(url)
    host, process, start = socket.gethostname(), os.getpid(), start_of(os.getpid())
    own_trial(url, f"{host}:{process}:{start}")
    with pytest.raises(StudyInUse):
        migrate(url)
    assert liveness_without_token(f"{host}:{process}:{start}") is Liveness.ALIVE
    assert liveness_without_token(f"{host}:{process}:1") is Liveness.DEAD
    assert liveness_without_token(f"{host}:999999999:{start}") is Liveness.DEAD
    assert liveness_without_token(f"elsewhere:{process}:{start}") is Liveness.UNKNOWN
    assert liveness_without_token("unknown form") is Liveness.UNKNOWN


def test_trials_of_dead_processes_run_again(url):
    make_study(url).leave()
    to_former_format(url)
    own_trial(url, "elsewhere:7:12")
    with pytest.raises(StudyInUse):
        migrate(url)
    migrate(url, take_over=True)
    with temporary_storage(url) as storage:
        study = optuna.load_study(study_name=schema.cell_study_name("s", CELL), storage=storage)
        owner = study.trials[-1].user_attrs[schema.OWNER]
    with peers(url).lock("storage"):
        assert peers(url).liveness(owner) is Liveness.DEAD


# ---- What the first versions did not store ----


def test_missing_keys_get_their_meaning():
    header = convert_header(
        "s",
        {
            "identity": {"study": {"run_on": True}},
            "config": {"study": {"slack": 3.0, "run_on": True, "engine": "sparse"}},
            "workload": "w",
            "goal": {"error": 0.1, "check_interval": 16, "max_steps": 160},
            "seed": 5,
            "space": {},
            "batch_sizes": [4],
            "sparsities": [0.0],
            "trials": 2,
            "environments": [{"python": "3.11"}],
            "lit_dps_format": 1,
        },
    )
    schema.check_keys(header, schema.HEADER_ATTRS)
    assert schema.HEADER_ATTRS.keys() - header.keys() == {schema.STATISTIC, schema.NOTES}
    assert header.keys() <= schema.HEADER_ATTRS.keys()
    assert header["race_factor"] is None and header["trial_seed"] == 5
    assert header["goal"]["value"] == 0.1 and header["repeats"]["count"] == 0
    assert header["environments"][0]["python"] == "3.11" and header["environments"][0]["key"]
    assert header["identity"] == {"study": {"train_past_goal": True}}
    assert header["config"] == {
        "study": {"race_factor": 3.0, "train_past_goal": True, "engine": "single"}
    }


def test_results_of_the_first_versions():
    former = {"status": "failed", "steps": None, "curve": {}, "kept": {}, "seconds": 1.0}
    result = convert_result(former)
    schema.check_keys(result, schema.RESULT_KEYS)
    # Readings are stored only of a study that has some.
    absent = {"readings", "end_readings", "smoothness", "theory", "unit"}
    assert result.keys() == schema.RESULT_KEYS.keys() - absent
    trial = convert_trial({"point": 2, "owner": "a:1:2", "result": former, "failed_at": 9.0})
    assert trial["repeat"] == 0 and trial["environment"] is None and trial["status"] == "failed"
    assert trial["result"]["failed_at"] == 9.0 and trial["result"]["failed_in"] == 0
    assert convert_trial({"point": 2}) == {"point": 2, "repeat": 0}


# ---- Columns ----


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        (list(range(16, 321, 16)), {"first", "interval", "length"}),
        ([16, 32, 64], None),
        ([0, 0, 1, 1, 0], {"runs"}),
        ([1, 0], {"runs"}),
        ([i / 6000 for i in (5000, 3000, 1234, 77, 0)], {"counts", "of", "bits"}),
        ([0.1, 0.2, float("nan"), 0.3, 0.7, float("inf")], {"counts", "of", "bits"}),
        ([0.123456789123, 0.2, 0.3, 0.4, 0.5], None),
        ([2.5, 0.1, 0.2, 0.3], None),
        ([0.5], None),
        ([], None),
    ],
)
def test_columns_read_back_exactly(values, keys):
    encoded = encode_columns({"val_error": values})["val_error"]
    if keys is None:
        assert isinstance(encoded, list)
    else:
        assert encoded.keys() == keys
    decoded = decode_columns({"val_error": encoded})["val_error"]
    assert repr(decoded) == repr(values)


def test_shares_of_32_bits_read_back_exactly():
    numpy = pytest.importorskip("numpy")
    shares = [float(numpy.float32(count / 6000)) for count in (5123, 377, 376, 12, 999, 0)]
    encoded = encode_columns({"val_error": shares})["val_error"]
    assert (encoded["of"], encoded["bits"]) == (6000, 32)
    assert encoded["counts"] == [5123, 377, 376, 12, 999, 0]
    assert decode_columns({"val_error": encoded})["val_error"] == shares


def test_the_training_loss_has_six_digits():
    losses = [2.302585092994046, 1.23456789e-7, float("nan"), 3]
    decoded = decode_columns(encode_columns({"train_loss": losses}))["train_loss"]
    assert repr(decoded) == repr([2.30259, 1.23457e-07, float("nan"), 3])
