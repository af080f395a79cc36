"""Database URLs: what is shown of them, and what drivers say with their secrets taken out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lit_dps.cli import without_secrets
from lit_dps.core.errors import StorageError
from lit_dps.storage.database import storage_errors
from lit_dps.storage.locks import storage_lock
from lit_dps.storage.read import list_studies, read_study
from lit_dps.storage.urls import absolute, is_http, is_postgresql, scrubbed, without_password
from tests.support.errors import raises_about, refuses
from tests.support.fake_study import law_study


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql+psycopg://me:secret@host:5432/db", "postgresql+psycopg://me:***@host:5432/db"),
        ("postgresql+psycopg://me@host/db", "postgresql+psycopg://me@host/db"),
        ("postgresql+psycopg://host:5432/db", "postgresql+psycopg://host:5432/db"),
        ("postgresql://:secret@host/db", "postgresql://:***@host/db"),
        ("postgresql://me:se/cr?t:@x@host/db", "postgresql://***"),
        (
            "postgresql:///db?host=h&password=secret&user=me",
            "postgresql:///db?***",
        ),
        ("https://me:secret@mlflow.org/x", "https://me:***@mlflow.org/x"),
        ("sqlite:///mlruns/study.db", "sqlite:///mlruns/study.db"),
        ("sqlite:////home/a:b@c/study.db", "sqlite:////home/a:b@c/study.db"),
        ("--storage.optuna=mysql://me:secret@host/db", "--storage.optuna=mysql://me:***@host/db"),
        ("study.db", "study.db"),
        ("sqlite:///x.db?cache=shared&key=secret", "sqlite:///x.db?***"),
        ("postgresql://me:sec@ret@host/db", "postgresql://***"),
        ("postgresql://host/db?user=me&PWD=secret", "postgresql://host/db?***"),
        (
            "mssql+pyodbc:///?odbc_connect=DRIVER%3Dx;PWD%3Dsecret",
            "mssql+pyodbc:///?***",
        ),
        ("https://host/x?access-token=secret", "https://host/x?***"),
        ("https://secret@host/x", "https://***@host/x"),
        ("postgresql://me:secret", "postgresql://***"),
        ("postgresql://me:sec\nret@host/db", "postgresql://***"),
        ("me:secret@host/db", "***"),
        ("host=db password=secret", "***"),
        ("postgresql:/me:secret@host/db", "***"),
        ("postgresql://me:12?x=secret", "postgresql://me:12?***"),
        ("postgresql://h/db?sslmode=require&sslpassword=a&b=c", "postgresql://h/db?***"),
        ("postgresql://h/db?x=PWD%3Dsecret", "postgresql://h/db?***"),
        ("postgresql://h/db?x=PWD%253Dsecret", "postgresql://h/db?***"),
        ("postgresql://h/db?x=me%3Asecret%40host", "postgresql://h/db?***"),
        ("sqlite:///x.db?Auth=secret", "sqlite:///x.db?***"),
        (
            "postgresql://me:secret@h/db?sslmode=require&connect_timeout=3",
            "postgresql://me:***@h/db?sslmode=require&connect_timeout=3",
        ),
    ],
)
def test_shown_hides_passwords_and_nothing_else(url, expected):
    assert without_password(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "postgresql:///db?host=/var/run/postgresql",
        "postgresql+psycopg:///db?host=a:5432&host=b:5433&target_session_attrs=primary",
        "postgresql://me@h/db?sslmode=require&connect_timeout=3&keepalives_idle=30",
        "postgresql://h/db?options=-csearch_path%3Dmine&application_name=lit+dps",
        "sqlite:////x/study.db?timeout=30&check_same_thread=false",
        "sqlite:///file:study.db?mode=ro&uri=true",
        "https://h:5000/mlflow?port=1",
    ],
)
def test_options_that_hold_no_secret_are_shown(url):
    assert without_password(url) == url
    assert without_password(f"--storage.optuna={url}") == f"--storage.optuna={url}"
    assert scrubbed(url, url) == url


def test_what_a_driver_says_is_scrubbed_in_both_spellings():
    url = "postgresql://me:s%40cret@host/db?sslpassword=other"
    said = 'invalid dsn "me:s%40cret@host", password "s@cret", key "other"'
    assert scrubbed(said, url) == 'invalid dsn "me:***@host", password "***", key "***"'
    assert scrubbed("no secret here", "sqlite:///x.db") == "no secret here"


def test_kinds_of_url():
    assert is_postgresql("postgresql+psycopg://h/d") and is_postgresql("postgres://h/d")
    assert not is_postgresql("sqlite:///postgresql://") and not is_postgresql("http://postgresql")
    assert is_http("http://h:5000") and is_http("https://h") and not is_http("sqlite:///http://x")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://me:hidden@127.0.0.1:9/db",
        "postgresql+nodriver://me:hidden@127.0.0.1/db",
        "postgresql+psycopg://me:hidden@127.0.0.1:port/db",
        "me:hidden@127.0.0.1/db",
    ],
    ids=["nobody listens", "no such driver", "no number", "no scheme"],
)
def test_no_error_tells_a_password(url):
    pytest.importorskip("psycopg")
    with pytest.raises(StorageError) as caught:
        list_studies(url)
    assert "hidden" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_gone_is_told_and_other_key_errors_are_not_taken_for_it():
    with (
        refuses("sqlite:///x.db", error=StorageError),
        storage_errors("sqlite:///x.db"),
    ):
        raise KeyError("Record does not exist.")
    with raises_about(KeyError, "other"), storage_errors("sqlite:///x.db"):
        raise KeyError("other")


def test_a_url_with_the_whole_path_of_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        absolute("sqlite:///mlruns/a.db?timeout=3") == f"sqlite:///{tmp_path}/mlruns/a.db?timeout=3"
    )
    for url in (f"sqlite:///{tmp_path}/a.db", "http://host:5000", "postgresql://me@host/db"):
        assert absolute(url) == url


def test_who_reads_waits_for_who_makes_the_database(tmp_path):
    url = f"sqlite:///{tmp_path}/study.db"
    law_study(url, batch_sizes=(4, 8), trials=4)
    with ThreadPoolExecutor() as threads:
        with storage_lock(url):  # of this thread
            reading = threads.submit(read_study, url, "fake")
            with pytest.raises(TimeoutError):
                reading.result(timeout=0.3)
        assert reading.result(timeout=20).name == "fake"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("mlruns/study.db", "mlruns/study.db"),
        ("nosuch://me:secret@host/db", "nosuch://me:***@host/db"),
        ("postgresql://me:secret@127.0.0.1:1/db", "postgresql://me:***@127.0.0.1:1/db"),
    ],
)
def test_a_bad_url_is_one_line_without_password(url, shown):
    with refuses(shown, error=StorageError) as error:
        read_study(url, "fake")
    assert shown in str(error.value)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


SHAPES = [
    "postgresql://me:{}@host/db",
    "https://{}@host/path",
    "postgresql://host/db?user=me&PWD={}",
    "https://host/x?access-token={}#part",
    "postgresql://host/db?password={}&sslmode=require",
    "mssql+pyodbc:///?odbc_connect={}",
    "postgresql://me:{}",
    "nosuch://me:{}@host:port/db?timeout=3",
    "me:{}@host/db",
    "host=db password={}",
    "postgresql:/me:{}@host/db",
]


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@example("https://host/x?access-token={}#part", "00123\\")
@example("me:{}@host/db", "0'1\\23")
@given(
    st.sampled_from(SHAPES),
    st.text(min_size=6, max_size=20).filter(lambda text: len(set(text)) > 4),
)
def test_whatever_the_url_its_secret_is_not_shown(shape, secret):
    url = shape.format(secret)
    shown = without_password(url)
    assert secret not in shown and shown.isprintable()
    assert secret not in scrubbed(f"driver: {url} {secret}", url)
    assert secret not in without_secrets(f"error: {url!r}", [url])
    with pytest.raises(StorageError) as caught, storage_errors(url):
        raise OSError(f"cannot reach {url}")
    assert secret not in str(caught.value)
