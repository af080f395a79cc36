"""Ctrl-C amid a write of `fit` to MLflow: the write ends first, so that the database is not locked
by it."""

import signal

import pytest
from lightning.pytorch.loggers import MLFlowLogger

from lit_dps.cli.fit import FitLogger
from lit_dps.parallel.process import defer_signals


@pytest.fixture(autouse=True)
def interrupts():
    """Python's own handler, as in a run."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("method", ["log_metrics", "log_hyperparams"])
def test_a_write_ends_before_the_interrupt(method, monkeypatch):
    written = []

    def write(self, values):
        signal.raise_signal(signal.SIGINT)
        written.append(values)

    monkeypatch.setattr(MLFlowLogger, method, write)
    logger = FitLogger.__new__(FitLogger)
    with pytest.raises(KeyboardInterrupt):
        getattr(logger, method)({"loss": 1.0})
    assert written == [{"loss": 1.0}]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_write_is_raised_and_the_handler_is_restored():
    with pytest.raises(OSError), defer_signals():
        raise OSError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_of_a_write_that_fails_is_not_lost():
    with pytest.raises(KeyboardInterrupt), defer_signals():
        signal.raise_signal(signal.SIGINT)
        raise OSError


def test_an_ignored_interrupt_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with defer_signals():
        signal.raise_signal(signal.SIGINT)
