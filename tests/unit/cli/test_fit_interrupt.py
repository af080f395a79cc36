"""Ctrl-C amid a write of `fit` to MLflow: the write ends first, so that the database is not locked
by it."""

import signal

import pytest
import torch
from lightning.pytorch.loggers import MLFlowLogger

from lit_dps.cli import fit
from lit_dps.cli.fit import FitLogger
from lit_dps.core import trial_config
from lit_dps.parallel.process import defer_signals


@pytest.fixture(autouse=True)
def interrupts():
    """Python's own handler, as in a run."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Client:
    """Takes the metrics of a run of MLflow; a signal comes during each write."""

    def __init__(self, signals: bool = False):
        self.writes: list[list[tuple]] = []
        self.signals = signals

    def log_batch(self, run_id, metrics):
        if self.signals:
            signal.raise_signal(signal.SIGINT)
        self.writes.append([(each.key, each.value, each.step) for each in metrics])

    def get_run(self, run_id):
        return None


def logger_of(client: Client, monkeypatch) -> FitLogger:
    monkeypatch.setattr(FitLogger, "experiment", client)
    return FitLogger(tracking_uri="sqlite://", run_id="1")


def test_metrics_are_written_together_and_at_the_end(monkeypatch):
    client = Client()
    logger = logger_of(client, monkeypatch)
    for step in range(3):
        logger.log_metrics({"loss": 1.0 + step, "top@5": torch.tensor(0.5)}, step)
    assert client.writes == []
    monkeypatch.setattr(fit, "SECONDS_BETWEEN_WRITES", 0.0)
    monkeypatch.setattr(fit, "MAX_METRICS_OF_MLFLOW", 6)
    logger.log_metrics({"loss": 0.5})
    first = [(name, value, step) for step in range(3) for name, value in step_of(step)]
    assert client.writes == [first, [("loss", 0.5, 0)]]
    monkeypatch.setattr(fit, "SECONDS_BETWEEN_WRITES", 100.0)
    logger.log_metrics({"loss": 0.25}, 9)
    logger.finalize("failed")
    assert client.writes[2:] == [[("loss", 0.25, 9)]]


def step_of(step: int) -> list[tuple[str, float]]:
    return [("loss", 1.0 + step), ("top5", 0.5)]


def test_a_write_of_metrics_ends_before_the_interrupt(monkeypatch):
    client = Client(signals=True)
    monkeypatch.setattr(fit, "SECONDS_BETWEEN_WRITES", 0.0)
    logger = logger_of(client, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        logger.log_metrics({"loss": 1.0}, 2)
    assert client.writes == [[("loss", 1.0, 2)]]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_write_of_hyperparameters_ends_before_the_interrupt(monkeypatch):
    method = "log_hyperparams"
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


def test_callbacks_that_do_nothing_are_left_out():
    made = {}
    for key, kind in fit.CALLBACKS.items():
        section = trial_config.TRIAL_SECTIONS[key]
        made[key] = kind.of(section(0.1) if key == "goal" else section())
    active = [key for key, callback in made.items() if not fit._is_idle(callback)]
    assert active == ["pruning", "goal"]
    delayed = fit.DelayCallback(2)
    reading = fit.ReadingsCallback(["lipschitz"])
    doubling = fit.BatchScheduleCallback("doubling", {"start": 0.5, "steps": 2})
    local = fit.LocalSGDCallback(2, 4)
    assert not any(map(fit._is_idle, (delayed, reading, doubling, local)))
