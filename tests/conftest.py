"""One thread for every test, as trials have it: results do not depend on the machine, and busy cores do no harm."""

import itertools

import pytest
import torch

from tests.postgres import Server, Unavailable, server

NUMBERS = itertools.count()

torch.set_num_threads(1)


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
