"""What happens to a study when others work on it too, and when it is changed under a process's
feet."""

from __future__ import annotations

import multiprocessing
import shutil
import sqlite3
import threading

import optuna
import pytest
from sqlalchemy import create_engine, text

from lit_dps.core.attempt import AttemptRules
from lit_dps.core.config import StudyConfig
from lit_dps.core.errors import StorageError
from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell
from lit_dps.storage import trial_queue as trials
from lit_dps.storage.cells import WrongCell
from lit_dps.storage.database import open_storage
from lit_dps.storage.header import declare
from lit_dps.storage.locks import ServerPeers, describe_owner, peers, storage_lock
from lit_dps.storage.read import read_study
from lit_dps.storage.samplers import SobolSampler, sobol_point
from lit_dps.storage.schema import OWNER, cell_study_name
from lit_dps.storage.take_over import claim_report, results_reported
from lit_dps.storage.trial_queue import TrialQueue
from lit_dps.storage.urls import without_password
from tests.support.errors import refuses
from tests.support.runs import trials_of
from tests.unit.storage.test_store import CELLS, DEAD, SPACE, _claim_all, ended

GOAL = Goal(0.1)
CELL = CELLS[:1]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def url(request, tmp_path):
    if request.param == "postgres":
        return request.getfixturevalue("postgres")
    return f"sqlite:///{tmp_path}/study.db"


def declared(url: str, **changed) -> str:
    config = StudyConfig(name="s", space=SPACE, batch_sizes=[4], sparsities=[0.0], trials=3)
    return declare(url, config, "workload", Goal(0.1), {"goal": {"error": 0.1}} | changed, {})[1]


def opened(url: str, uid: str | None, cells=CELL) -> TrialQueue:
    return TrialQueue(url, "s", cells, 3, SobolSampler(SPACE, 5), 5, AttemptRules(GOAL), uid=uid)


def delete(url: str, *names: str) -> None:
    for name in names:
        optuna.delete_study(study_name=name, storage=url)


def test_a_study_made_anew_gets_nothing_of_a_process_that_worked_on_the_old_one(url):
    working = opened(url, declared(url))
    asked = trials_of(working)
    trial = next(asked)
    delete(url, "s", cell_study_name("s", trial.cell))
    new = opened(url, declared(url, data_digest="other"))
    theirs = next(trials_of(new))  # a database may give it the numbers of the old one
    for late in (
        lambda: working.store_result(ended(trial)),
        lambda: next(asked),
        working.release_claims,
    ):
        with refuses("study.name", "s", error=StorageError):
            late()
    new.store_result(ended(theirs))
    results = read_study(url, "s").results[trial.cell]
    assert [r.trial.point for r in results] == [0]


def test_cells_that_an_earlier_study_left_behind_are_not_taken_up(url):
    first = opened(url, declared(url))
    first.store_result(ended(next(trials_of(first))))
    delete(url, "s")
    with pytest.raises(WrongCell) as caught:
        next(trials_of(opened(url, declared(url))))
    assert (caught.value.name, caught.value.keys) == (cell_study_name("s", Cell(4)), ("uid",))


def test_a_header_cut_short_is_written_anew_and_keeps_its_cells(url):
    uid = declared(url)
    first = opened(url, uid)
    first.store_result(ended(next(trials_of(first))))
    attribute = "delete from study_user_attributes where key = 'lit_dps_format'"
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text(attribute))
    engine.dispose()
    assert declared(url) == uid
    assert [trial.point for trial in trials_of(opened(url, uid))] == [1, 2]


def test_a_cell_that_vanished_is_one_line(url):
    working = opened(url, declared(url))
    trial = next(trials_of(working))
    delete(url, cell_study_name("s", trial.cell))
    with refuses(without_password(url), error=StorageError):
        working.store_result(ended(trial))


def test_a_trial_that_was_given_to_another_is_not_told(url):
    """A process that was taken for dead, its connection lost, and that lives on."""
    uid = declared(url)
    one = opened(url, uid)
    trial = next(trials_of(one))
    one._claims[trial.cell, trial.point, 0].study.tell(0, state=optuna.trial.TrialState.FAIL)
    other = opened(url, uid)
    taken = next(t for t in trials_of(other) if t.point == trial.point)
    one.store_result(ended(trial))
    assert read_study(url, "s").results[trial.cell] == []
    other.store_result(ended(taken))
    assert [r.trial.point for r in read_study(url, "s").results[trial.cell]] == [trial.point]


def test_the_last_one_out_reports_once(url):
    uid = declared(url)
    one, other = opened(url, uid), opened(url, uid)
    mine, theirs = (
        next(trials_of(one)),
        [trial for trial, _ in zip(trials_of(other), range(2), strict=False)],
    )
    left = claim_report(url, "s")
    assert left.is_running
    assert left.reason.startswith("3 trials ") and describe_owner(one.peers.owner) in left.reason
    for trial in theirs:
        other.store_result(ended(trial))
    assert claim_report(url, "s").reason.startswith("1 trial ")
    one.store_result(ended(mine))
    assert claim_report(url, "s") is None
    assert not claim_report(url, "s").is_running, "another process has written the analysis"
    assert not claim_report(url, "s", reported_before=2).is_running
    # The last analysis is from before this run, so nobody else writes one.
    assert results_reported(url, "s") == 3
    assert claim_report(url, "s", reported_before=3) is None


def test_trials_of_the_dead_do_not_keep_others_from_reporting(url):
    one = opened(url, declared(url))
    trial = next(trials_of(one))
    one._claims[trial.cell, trial.point, 0].set_user_attr(OWNER, DEAD)
    assert claim_report(url, "s") is None


def test_a_database_put_back_is_run_to_the_same_end(tmp_path):
    """Power-off: the file is as it was some time before, with trials of processes that are gone."""
    url = f"sqlite:///{tmp_path}/study.db"
    uid = declared(url)
    first = opened(url, uid)
    asked = trials_of(first)
    first.store_result(ended(next(asked)))
    lost = next(asked)
    first._claims[lost.cell, lost.point, 0].set_user_attr(OWNER, DEAD)
    shutil.copy(tmp_path / "study.db", tmp_path / "copy.db")
    first._claims.clear()
    rest = opened(url, uid)
    for trial in trials_of(rest):
        rest.store_result(ended(trial))
    before = read_study(url, "s").results
    shutil.copy(tmp_path / "copy.db", tmp_path / "study.db")
    again = opened(url, uid)
    points = []
    for trial in trials_of(again):
        points.append(trial.point)
        again.store_result(ended(trial))
    assert sorted(points) == [1, 2]
    assert read_study(url, "s").results == before


@pytest.mark.slow
@pytest.mark.long
def test_processes_neither_double_nor_lose_a_point_on_an_empty_server(postgres):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [
        context.Process(target=_claim_all, args=(postgres, barrier, results)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    claimed, left = [], len(processes)
    while left:
        message = results.get(timeout=120)
        left -= message is None
        claimed += [message] if message else []
    for process in processes:
        process.join(30)
    assert sorted(point for _, point in claimed) == list(range(20))
    assert len({pid for pid, _ in claimed}) > 1, "one process did all the work: nothing was tested"


@pytest.mark.slow
def test_a_lost_connection_is_one_line_and_the_study_goes_on(postgres):
    uid = declared(postgres)
    one = opened(postgres, uid)
    asked = trials_of(one)
    one.store_result(ended(next(asked)))
    lost = next(asked)
    engine = create_engine(postgres, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        end = (
            "select pg_terminate_backend(pid, 20000) from pg_stat_activity where pid <> "
            "pg_backend_pid()"
        )
        connection.execute(text(end + " and datname = current_database()"))
    engine.dispose()
    with pytest.raises(StorageError) as caught:
        one.store_result(ended(lost))
    assert "s3cret" not in str(caught.value) and "\n" not in str(caught.value)
    assert [trial.point for trial in trials_of(opened(postgres, uid))] != []


def test_sqlite_files_of_two_studies_do_not_wait_for_each_other(tmp_path):
    one, other = (f"sqlite:///{tmp_path}/{name}.db" for name in "ab")
    with storage_lock(one):
        open_storage(other)
    assert {path.name for path in tmp_path.iterdir()} == {"a.db.lock", "b.db", "b.db.lock"}
    with sqlite3.connect(tmp_path / "b.db") as connection:
        assert connection.execute("select count(*) from studies").fetchone() == (0,)


def of_worker(url: str, number: int) -> str:
    """The URL by which a thread has sessions of its own, as a process has."""
    return f"{url}?application_name=worker-{number}"


@pytest.mark.slow
def test_on_a_server_trials_are_taken_and_told_while_another_holds_the_storage(postgres):
    uid = declared(postgres)
    one = opened(postgres, uid)
    one.store_result(ended(one.claim_next().trial))
    done = []

    def work() -> None:
        trial = one.claim_next().trial
        done.append(one.store_result(ended(trial)))
        one.release_claims()

    other = ServerPeers(postgres)
    with other.lock("storage"):
        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        worker.join(60)
        assert len(done) == 1, "it waited for a lock that it does not need"
    other.close()
    assert [r.trial.point for r in read_study(postgres, "s").results[CELLS[0]]] == [0, 1]


@pytest.mark.slow
def test_workers_that_take_trials_at_once_neither_double_nor_lose_a_point(postgres, monkeypatch):
    monkeypatch.setattr(trials, "MAX_QUEUED", 4)  # so that they meet at the declaring too
    uid, points, claimed, errors = declared(postgres), 24, [], []
    begin = threading.Barrier(6)

    def work(number: int) -> None:
        url = of_worker(postgres, number)
        try:
            store = TrialQueue(
                url, "s", CELL, points, SobolSampler(SPACE, 5), 5, AttemptRules(GOAL), uid=uid
            )
            begin.wait(60)
            for trial in trials_of(store):
                claimed.append((number, trial.point, trial.params))
                store.store_result(ended(trial))
        except Exception as error:  # shown by the test
            errors.append(error)
        finally:
            peers(url).close()

    workers = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert errors == []
    assert sorted(point for _, point, _ in claimed) == list(range(points))
    assert len({number for number, _, _ in claimed}) > 1, "one did all the work: nothing was tested"
    assert all(params == sobol_point(SPACE, 5, point) for _, point, params in claimed)
    assert claim_report(postgres, "s") is None
