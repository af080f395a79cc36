"""A migration that is killed leaves each study in its former format or in the present one."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from lit_dps.storage import schema
from lit_dps.storage.advice_store import AdviceStore
from lit_dps.storage.database import temporary_storage
from lit_dps.storage.locks import ServerPeers, peers
from lit_dps.storage.migrate import migrate
from lit_dps.storage.read import read_study
from lit_dps.storage.stored_format import OtherFormat, study_attributes
from tests.e2e.commands import environment
from tests.support.former_format import to_former_format
from tests.unit.storage.test_migrate import as_text, everything, make_study


@pytest.fixture(params=["sqlite", "postgres"])
def any_url(request, tmp_path):
    if request.param == "postgres":
        return request.getfixturevalue("postgres")
    return f"sqlite:///{tmp_path}/study.db"


MIGRATE = """
import sys
from lit_dps.storage.migrate import migrate
print(flush=True)
migrate(sys.argv[1])
"""


@pytest.mark.long
def test_a_kill_at_any_moment_leaves_a_study_whole(any_url, tmp_path):
    for name in ("s", "t"):
        make_study(any_url, name).leave()
    before = everything(any_url)
    to_former_format(any_url)
    killed = 0
    for attempt in range(12):
        end_session(any_url)
        argv = [sys.executable, "-c", MIGRATE, any_url]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment())
        process.stdout.readline()
        time.sleep(0.02 * attempt)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        for name in ("s", "t"):
            with temporary_storage(any_url) as storage:
                stored = study_attributes(storage, name)[schema.FORMAT_ATTR]
            if stored == schema.FORMAT:
                assert as_text(read_study(any_url, name)) in before
            else:
                with pytest.raises(OtherFormat):
                    read_study(any_url, name)
    assert killed > 0
    migrate(any_url)
    assert everything(any_url) == before


# For each number N that it reads, a child process runs `lit-dps migrate` and kills itself at the
# N-th moment: before a statement that changes a stored value, before a commit, or after a commit.
KILLED_AT = """
import os, signal, sys
from sqlalchemy import Engine, event
from sqlalchemy.orm import Session
from lit_dps.cli import main
import lit_dps.cli.migrate

def count_down(*arguments):
    global remaining
    remaining -= 1
    if remaining == 0:
        os.kill(os.getpid(), signal.SIGKILL)

def at_statement(connection, cursor, statement, *arguments):
    if "user_attributes" in statement and not statement.startswith("SELECT"):
        count_down()

event.listen(Engine, "before_cursor_execute", at_statement)
event.listen(Session, "before_commit", count_down)
event.listen(Session, "after_commit", count_down)
for line in sys.stdin:
    remaining = int(line)
    child = os.fork()
    if child == 0:
        os.dup2(2, 1)  # the parent reports on standard output
        os._exit(main(["migrate", "--storage", sys.argv[1]]))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def all_attributes(url: str, name: str) -> str:
    """Return every user attribute of a study's Optuna studies and trials, as text."""
    attributes = {}
    with temporary_storage(url) as storage:
        for study in storage.get_all_studies():
            if study.study_name.split(" | ")[0].removesuffix(schema.ADVICE_SUFFIX) == name:
                trials = storage.get_all_trials(study._study_id, deepcopy=False)
                by_number = {trial.number: trial.user_attrs for trial in trials}
                attributes[study.study_name] = (study.user_attrs, by_number)
    return as_text(attributes)


def end_session(url: str) -> None:
    """End this process's session at the server, which would keep others from converting."""
    if isinstance(peers(url), ServerPeers):
        peers(url).close()


@pytest.mark.long
def test_a_kill_at_any_statement_leaves_each_study_in_one_format(any_url):
    names = ("s", "t")
    for name in names:
        make_study(any_url, name).leave()
    before = everything(any_url)
    advice = {name: AdviceStore(any_url, name).read() for name in names}
    to_former_format(any_url)
    former = {name: all_attributes(any_url, name) for name in names}
    converted = set()
    argv = [sys.executable, "-c", KILLED_AT, any_url]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(argv, env=environment(), **pipes) as process:
        moment, code = 0, None
        while code != 0:
            moment += 1
            end_session(any_url)
            print(moment, file=process.stdin, flush=True)
            code = int(process.stdout.readline())
            assert code in (0, -signal.SIGKILL)
            for name in names:
                if all_attributes(any_url, name) != former[name]:
                    converted.add(name)
                if name in converted:
                    assert as_text(read_study(any_url, name)) in before
                    assert AdviceStore(any_url, name).read() == advice[name]
        process.stdin.close()
    assert moment > 30 and converted == {"s", "t"}
    assert everything(any_url) == before
    assert migrate(any_url).converted == {}
