"""One thread for every test, as trials have it: results do not depend on the machine, and busy
cores do no harm."""

import compileall
import gc
import itertools
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
import torch

import lit_dps
from lit_dps.parallel.process import keep_freed_memory
from tests.support import golden as golden_files
from tests.support import installed, pictures, schema
from tests.support.golden import golden  # noqa: F401
from tests.support.postgres import Server, Unavailable, server

NUMBERS = itertools.count()
E2E = (
    "checkpoint_study",
    "ddp",
    "resume",
    "tutorial",
    "extending",
    "racing",
    "advise",
    "goals",
    "postgres",
)
TESTS_OF_SOAP = ("test_soap.py", "test_delay_callback.py")
LONGEST = ("tests/parity", *(f"tests/e2e/test_{name}" for name in E2E))
MEMORY, ENOUGH = Path("/dev/shm"), 4 * 2**30  # bytes; all tests leave less

# Databases wait for the disk at every commit: folders of tests lie in memory where that has room.
if (
    "TMPDIR" not in os.environ
    and os.access(MEMORY, os.W_OK)
    and shutil.disk_usage(MEMORY).free >= ENOUGH
):
    os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)

# Processes that tests start find the package compiled, also where Python may not write bytecode.
if "PYTEST_XDIST_WORKER" not in os.environ:
    compileall.compile_dir(Path(lit_dps.__file__).parent, quiet=2)

os.environ.setdefault("LIT_DPS_STEP_TIMING", "0")  # seconds at the end of every study
torch.set_num_threads(1)
keep_freed_memory()  # as the commands do
schema.use_copies()
installed.look_up_once()
pictures.use_placeholders(are_made=False)
os.environ.setdefault(pictures.KEY, pictures.NONE)
TABLES = tempfile.TemporaryDirectory(prefix="lit_dps-tables-")
os.environ.setdefault(
    schema.KEY, f"{TABLES.name}/mlflow.db"
)  # workers of xdist inherit the first one's
# Studies of tests are not noted as the user's.
os.environ["XDG_STATE_HOME"] = f"{TABLES.name}/state"
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # by a script's "&": so would all processes that the tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --update-golden."""
    parser.addoption(
        golden_files.OPTION,
        action="store_true",
        help="write the golden files of the tests that run, instead of comparing with them",
    )


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests first: begun last, they would leave the other cores idle at the end."""
    for item in items:
        # SOAP takes seconds for its eigenvectors. Its own tests check that it conforms; tests of
        # delays compare the loops with it.
        has_soap = "soap" in item.name.partition("[")[2]
        if has_soap and not any(name in item.nodeid for name in TESTS_OF_SOAP):
            item.add_marker(pytest.mark.long)
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect tests without garbage collection, and exclude what they import from later ones.

    Two million objects stay until the end. A full collection of them takes half a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Let the interpreter collect everything at its exit; libraries warn of objects that stay."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def one_thread():
    """Again after a test whose command took more: ranks that are forked would hang in OpenMP, and
    sums differ."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def drawn_pictures(request, monkeypatch):
    """Draw the pictures of figures in tests that are about them."""
    mark = request.node.get_closest_marker("pictures")
    if mark and mark.args:
        monkeypatch.setenv(pictures.KEY, ",".join(mark.args))
    elif mark:
        monkeypatch.delenv(pictures.KEY, raising=False)


@pytest.fixture(scope="session")
def postgres_server():
    """A PostgreSQL server; without one the test is skipped."""
    try:
        with server() as running:
            yield running
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def postgres(postgres_server: Server) -> str:
    """The URL of an empty PostgreSQL database, with a password in it."""
    return postgres_server.new_database(f"test_{next(NUMBERS)}")
