"""Step times that are measured alone at the end of a study: values, rounds, storage, and what
happens without them."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from lit_dps.analysis.step_seconds import QUIET, step_seconds
from lit_dps.core.attempt import Attempt, Validation
from lit_dps.core.environment import DATA, SOURCES, Environment, with_key
from lit_dps.core.errors import StorageError
from lit_dps.core.goal import Goal
from lit_dps.core.record import StudyRecord
from lit_dps.core.search_space import Choices, Range
from lit_dps.core.step_timing import CellTiming, StepTiming, sizes_of
from lit_dps.core.trial import LIGHTNING, SINGLE, Cell, Trial
from lit_dps.parallel.process import Interrupted, StopRequest
from lit_dps.storage.read import read_study
from lit_dps.storage.run_records import store_step_timing
from lit_dps.study import quiet_timing
from lit_dps.study.probe_run import RunTimes, _StepTimer, is_narrow
from lit_dps.study.quiet_timing import MIN_ROUNDS, ROUNDS, SWITCH, WARM_UP_STEPS, update_step_timing
from lit_dps.training import GoalErrorCallback
from lit_dps.training.checkpoint_callback import Paused
from lit_dps.training.workload import Workload
from tests.support.fake_study import GOAL, SPACE, result, write_study
from tests.support.runs import engine
from tests.support.texts import numbers_in
from tests.unit.engines.test_engine import WORKLOAD
from tests.zoo.animals.models import Net
from tests.zoo.run import spec

CPU = torch.device("cpu")
CELLS = (Cell(4), Cell(8), Cell(4, 0.5), Cell(8, 0.5))
SECONDS = {Cell(4): 0.010, Cell(8): 0.014, Cell(4, 0.5): 0.012, Cell(8, 0.5): 0.016}


@pytest.fixture
def clock(monkeypatch):
    """Runs in place of `timed_run` that take a known time; returns the calls."""
    calls = []
    seconds = SimpleNamespace(now=0.0)

    def run(_, trial, steps, together=False, warm_up=1):
        calls.append((trial.cell, trial.point, steps, together, warm_up))
        seconds.now += 1.0
        return RunTimes(0.5, SECONDS[trial.cell] * (1 + 0.1 * len(calls)), 0.25)

    monkeypatch.setattr(quiet_timing, "timed_run", run)
    monkeypatch.setattr(quiet_timing, "time", SimpleNamespace(monotonic=lambda: seconds.now))
    monkeypatch.setenv(SWITCH, "1")
    return calls


@pytest.fixture
def study(tmp_path):
    """A stored study of four cells; the best trial of each is its second."""
    url = f"sqlite:///{tmp_path}/study.db"
    params = {key: box.at(0.5) for key, box in SPACE.items()}
    cells = {c: [result(c, i, k, params=params) for i, k in enumerate((64, 32))] for c in CELLS}
    write_study(url, cells, "quiet", goal=GOAL, space=SPACE)
    given = SimpleNamespace(threads=1, name="quiet", seed=0)
    storage = SimpleNamespace(optuna_url=url)
    environment = SimpleNamespace(code_key="code a")
    made = SimpleNamespace(
        study=given, storage=storage, ranks=1, middle=params, environment=environment
    )
    made.without_readings = lambda: made
    return made, url


def test_cells_are_timed_in_rounds_after_a_warm_up_with_the_trial_of_k_star(clock, study):
    setup, url = study
    found = update_step_timing(setup, read_study(url, "quiet"), StopRequest())
    timing = found.step_timing
    warm, *calls = clock
    assert [call[0] for call in calls] == [*read_study(url, "quiet").cells] * ROUNDS
    assert {call[1] for call in calls} == {1} and {call[4] for call in calls} == {WARM_UP_STEPS}
    assert timing.rounds == ROUNDS and timing.covers(CELLS)
    first = timing.by_cell[calls[0][0]].steps
    expected = [SECONDS[calls[0][0]] * (1 + 0.1 * (2 + 4 * i)) for i in range(ROUNDS)]
    assert list(first) == pytest.approx(expected)
    assert read_study(url, "quiet").step_timing == timing


def test_times_are_measured_again_only_where_something_changed(clock, study, monkeypatch):
    setup, url = study
    record = update_step_timing(setup, read_study(url, "quiet"), StopRequest())
    made = len(clock)
    assert update_step_timing(setup, record, StopRequest()).step_timing == record.step_timing
    assert len(clock) == made
    update_step_timing(setup, record, StopRequest(), asked=True)
    assert len(clock) == 2 * made
    setup.study.threads = 2
    assert update_step_timing(setup, record, StopRequest()).step_timing.threads == 2
    assert len(clock) == 3 * made
    setup.environment.code_key = "code b"
    record = update_step_timing(setup, record, StopRequest())
    assert record.step_timing.environment == "code b" and len(clock) == 4 * made
    monkeypatch.setattr(quiet_timing, "hardware", lambda: "another machine")
    assert update_step_timing(setup, record, StopRequest()).step_timing.machine == "another machine"


WIDTHS = {"model.learning_rate": Range(0.01, 1.0, "log"), "model.width": Choices([64, 1024])}


def widths_at(url: str, name: str, steps_of_wide: int, rate: float = 0.1) -> StudyRecord:
    """A study of one cell: a narrow network that needs 64 steps, and a wide one."""
    narrow = {"model.learning_rate": 0.1, "model.width": 64}
    wide = {"model.learning_rate": rate, "model.width": 1024}
    trials = [
        result(Cell(4), 0, 64, params=narrow),
        result(Cell(4), 1, steps_of_wide, params=wide),
    ]
    write_study(url, {Cell(4): trials}, name, goal=GOAL, space=WIDTHS)
    return read_study(url, name)


def test_times_are_measured_again_if_the_best_trial_has_another_size(clock, study):
    setup, url = study
    first = update_step_timing(setup, widths_at(url, "narrow", 128), StopRequest())
    assert first.step_timing.by_cell[Cell(4)].params["model.width"] == 64
    assert step_seconds(first)[Cell(4)].source == QUIET
    made = len(clock)
    # The wide network has become the best one: its steps are not the ones that were timed.
    wide = dataclasses.replace(widths_at(url, "wide", 32), step_timing=first.step_timing)
    assert Cell(4) not in step_seconds(wide)
    setup.study.name = "wide"
    second = update_step_timing(setup, wide, StopRequest())
    assert len(clock) > made
    assert second.step_timing.by_cell[Cell(4)].params["model.width"] == 1024
    made = len(clock)
    other_rate = dataclasses.replace(
        widths_at(url, "rate", 32, rate=0.3), step_timing=second.step_timing
    )
    assert update_step_timing(setup, other_rate, StopRequest()) is other_rate
    assert len(clock) == made and step_seconds(other_rate)[Cell(4)].source == QUIET


def test_times_of_an_earlier_version_hold_only_without_sizes():
    """Earlier versions did not store which trial was timed."""
    timing = StepTiming("m", "2026-11-29", 1, 1, (CellTiming(Cell(4), (0.1,), 1.0),))
    best = [Trial(Cell(4), 0, {"model.learning_rate": 0.1, "model.width": 64})]
    assert not timing.is_of(best, WIDTHS)
    assert not timing.is_of(best, {"model.width": Range(8, 64, integer=True)})
    assert timing.is_of(best, {"model.learning_rate": Range(0.01, 1.0, "log")})
    assert not timing.is_of([Trial(Cell(8), 0, {})], {})


def test_a_long_measurement_ends_after_few_rounds_and_a_longer_one_is_left_out(
    clock, study, monkeypatch, capsys
):
    setup, url = study
    monkeypatch.setattr(quiet_timing, "TARGET_SECONDS", 4.0)
    record = update_step_timing(setup, read_study(url, "quiet"), StopRequest())
    assert record.step_timing.rounds == MIN_ROUNDS
    monkeypatch.setattr(quiet_timing, "MAX_SECONDS", 8.0)
    other_threads = dataclasses.replace(record.step_timing, threads=2)
    former = dataclasses.replace(record, step_timing=other_threads)
    # The answer uses times of the trials then, also when the study is read again.
    assert update_step_timing(setup, former, StopRequest()).step_timing is None
    assert read_study(url, "quiet").step_timing is None
    last = capsys.readouterr().err.splitlines()[-1]
    # The expected seconds, and those that are allowed.
    assert numbers_in(last) == [12, 8]
    asked = update_step_timing(setup, former, StopRequest(), asked=True)
    assert asked.step_timing.threads == 1


def test_a_failure_costs_only_the_times(clock, study, monkeypatch, capsys):
    setup, url = study

    def fails(*args):
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(quiet_timing, "timed_run", fails)
    record = read_study(url, "quiet")
    assert update_step_timing(setup, record, StopRequest()) == record
    assert capsys.readouterr().err.endswith(": out of memory\n")


def test_an_interruption_stores_nothing(clock, study):
    setup, url = study
    stop = StopRequest(lambda: len(clock) > 4)
    with pytest.raises(Interrupted):
        update_step_timing(setup, read_study(url, "quiet"), stop)
    assert len(clock) == 5 and read_study(url, "quiet").step_timing is None


@pytest.mark.parametrize(("code", "remains"), [("code a", True), ("code b", False)])
def test_an_interruption_keeps_only_times_of_the_same_code(clock, study, code, remains):
    setup, url = study
    record = update_step_timing(setup, read_study(url, "quiet"), StopRequest())
    setup.environment.code_key = code
    with pytest.raises(Interrupted):
        update_step_timing(setup, record, StopRequest(lambda: True), asked=True)
    stored = read_study(url, "quiet").step_timing
    assert stored == (record.step_timing if remains else None)


def test_times_of_other_code_do_not_remain_if_the_measurement_fails(clock, study, monkeypatch):
    setup, url = study
    record = update_step_timing(setup, read_study(url, "quiet"), StopRequest())
    setup.environment.code_key = "code b"

    def fails(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(quiet_timing, "timed_run", fails)
    assert update_step_timing(setup, record, StopRequest()).step_timing is None
    assert read_study(url, "quiet").step_timing is None


def test_the_key_of_times_does_not_depend_on_whether_the_data_were_hashed():
    code = {SOURCES: {"mine.py": ["bytes", "tree"]}, "python": "3.12"}
    trained = with_key({**code, DATA: {"": ["hash"]}}, "2026-11-29 14:05")
    finished = with_key(code, "2026-11-30 09:00")
    assert Environment(trained).code_key == Environment(finished).code_key
    commented = {**code, SOURCES: {"mine.py": ["other bytes", "tree"]}}
    assert Environment(commented).code_key == Environment(code).code_key
    edited = {**code, SOURCES: {"mine.py": ["other bytes", "other tree"]}}
    assert Environment(edited).code_key != Environment(code).code_key
    other = with_key({**code, "python": "3.13"}, "2026-11-30 09:00")
    assert Environment(other).code_key != Environment(finished).code_key


@pytest.mark.parametrize(("threads", "remains"), [(1, True), (7, False)])
def test_times_of_an_earlier_version_remain_under_the_same_conditions(
    clock, study, monkeypatch, threads, remains
):
    setup, url = study
    record = update_step_timing(setup, read_study(url, "quiet"), StopRequest())
    now = record.step_timing
    assert now is not None
    earlier = dataclasses.replace(now, environment=None)
    if not remains:
        earlier = dataclasses.replace(earlier, threads=threads)
    record = dataclasses.replace(record, step_timing=earlier)

    def fails(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(quiet_timing, "timed_run", fails)
    found = update_step_timing(setup, record, StopRequest()).step_timing
    assert found == (earlier if remains else None)


@pytest.mark.parametrize(
    ("key", "box", "is_size"),
    [
        ("model.width", Range(16, 64, integer=True), True),
        ("model.refresh_steps", Range(1, 100, integer=True), True),
        ("model.decay_steps", Range(100, 1000, integer=True), False),
        ("model.width_multiplier", Choices([0.5, 1, 2]), True),
        ("model.dropout", Choices([0, 0.1, 0.5]), False),
        ("model.lr", Choices([1, 0.1]), False),
    ],
)
def test_sizes_are_the_metaparameters_that_may_change_a_step(key, box, is_size):
    assert (key in sizes_of({key: 1}, {key: box})) is is_size


def test_the_switch_leaves_it_out(clock, study, monkeypatch):
    setup, url = study
    monkeypatch.setenv(SWITCH, "0")
    assert update_step_timing(setup, read_study(url, "quiet"), StopRequest()).step_timing is None
    assert not clock


def test_what_is_stored_is_what_was_measured(tmp_path, study):
    _, url = study
    cells = (
        CellTiming(Cell(8, 0.5, (("optim.delay", 4),)), (0.01, 0.02), 0.5, {"model.width": 64}),
        CellTiming(Cell(4), (0.03,), 1.5),
    )
    timing = StepTiming("Xeon, 2 cores", "2026-11-27", 2, 1, cells, "code a")
    assert StepTiming.from_dict(json.loads(json.dumps(timing.to_dict()))) == timing
    store_step_timing(url, "quiet", timing)
    assert read_study(url, "quiet").step_timing == timing


def test_warm_up_steps_are_not_timed(monkeypatch):
    seconds = iter([10.0, 16.0])
    monkeypatch.setattr("lit_dps.study.probe_run.now", lambda device: next(seconds))
    attempt = Attempt(Trial(Cell(4), 0, {}), Goal(0.5, check_interval=5, max_steps=5))
    clock = _StepTimer(attempt, warm_up=2)
    for _ in range(5):
        attempt.on_step(CPU)
    assert (clock.first.time, clock.last.time) == (10.0, 16.0)  # after steps 2 and 5: three steps


def test_only_the_second_run_is_timed_if_the_first_one_needs_lightning(monkeypatch):
    seconds = iter([1.0, 2.0, 10.0, 16.0, 19.0])  # two of the first run
    monkeypatch.setattr("lit_dps.study.probe_run.now", lambda device=None: next(seconds))
    attempt = Attempt(Trial(Cell(4), 0, {}), Goal(0.5, check_interval=5, max_steps=5))
    timer = _StepTimer(attempt, warm_up=1)
    attempt.set_engine(SINGLE)
    for _ in range(5):
        attempt.on_step(CPU)
    attempt.restart()
    attempt.set_engine(LIGHTNING)
    for _ in range(5):
        attempt.on_step(CPU)
    attempt.record(Validation(5, 0.9, True, 1.0, True))
    assert (timer.first.time, timer.last.time, timer.checked.time) == (10.0, 16.0, 19.0)


def timer_of_known_steps(
    monkeypatch, seconds: list[float], waited: list[float], most: float, period: int = 1
):
    """A timer of 97 steps, of which 96 are timed in blocks of 6."""
    clocks = {"seconds": iter(seconds), "waited": iter(waited)}
    monkeypatch.setattr("lit_dps.study.probe_run.now", lambda device: next(clocks["seconds"]))
    monkeypatch.setattr("lit_dps.study.probe_run.cpu_wait_seconds", lambda: next(clocks["waited"]))
    attempt = Attempt(Trial(Cell(4), 0, {}), Goal(0.5, check_interval=97, max_steps=97))
    return _StepTimer(attempt, 1, most, period)


class TwoOptimizers(Net):
    """Trains its weights and its biases with an optimizer each."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        weights = [p for p in self.parameters() if p.ndim > 1]
        biases = [p for p in self.parameters() if p.ndim == 1]
        return [torch.optim.SGD(group, self.hparams.lr) for group in (weights, biases)]


TWO_OPTIMIZERS = Workload(
    {"class_path": f"{__name__}.TwoOptimizers"}, spec("data.Clouds"), {"accelerator": "cpu"}
)
LOCAL = {"local": {"workers": 2, "steps": 2, "start": 0}}


@pytest.mark.parametrize(
    ("used", "options"),
    [
        (TWO_OPTIMIZERS, {"lean": False}),
        (WORKLOAD, {}),
        (WORKLOAD, LOCAL),
        (WORKLOAD, {**LOCAL, "lean": False}),
    ],
    ids=["two optimizers", "interval loop", "workers", "workers in Lightning's loop"],
)
def test_a_step_is_one_step_whatever_its_updates(used, options):
    goal = {"error": 0.0001, "check_interval": 3, "max_steps": 6}
    attempt = Attempt(Trial(Cell(16), 0, {}), GoalErrorCallback(**goal).goal)
    timer = _StepTimer(attempt, warm_up=1)
    queue = iter([attempt])
    (result,) = engine(used, goal, **options).train(lambda: next(queue, None))
    assert (timer.steps, result.steps_run, result.failure) == (6, 6, "")
    assert 0 < timer.first.time < timer.last.time < timer.checked.time


def test_a_timed_run_ends_once_its_steps_agree_without_the_wait_for_a_cpu(monkeypatch):
    # Each block takes 6 s, and every second one waits 4 s more for a CPU.
    seconds = [0.0, 6.0, 16.0, 22.0, 32.0, 38.0, 48.0, 54.0]
    waited = [0.0, 0.0, 4.0, 4.0, 8.0, 8.0, 12.0, 12.0]
    timer = timer_of_known_steps(monkeypatch, seconds, waited, most=1e9)
    with pytest.raises(Paused):
        for _ in range(97):
            timer.on_step(CPU)
    assert timer.ended_after == 36 and timer.steps == 37, "six blocks, after the warm-up"
    first, last = timer.first, timer.last
    assert (last.time - first.time, last.waited - first.waited) == (48.0, 12.0)


def test_a_timed_run_whose_steps_differ_ends_when_its_time_is_over(monkeypatch):
    seconds = [0.0, 6.0, 18.0, 24.0, 36.0, 42.0, 54.0, 60.0, 72.0]
    timer = timer_of_known_steps(monkeypatch, seconds, [0.0] * 9, most=59.0)
    with pytest.raises(Paused):
        for _ in range(97):
            timer.on_step(CPU)
    assert timer.ended_after == 42


def test_a_timed_run_ends_after_whole_periods(monkeypatch):
    seconds = [0.0, 6.0, 12.0, 18.0, 24.0, 30.0, 36.0]
    timer = timer_of_known_steps(monkeypatch, seconds, [0.0] * 7, most=1e9, period=4)
    with pytest.raises(Paused):
        for _ in range(97):
            timer.on_step(CPU)
    assert timer.ended_after == 48, "six blocks of 8 steps, not of 6"


def test_a_mean_is_narrow_by_its_standard_error():
    assert not is_narrow([1.0] * 5), "too few"
    assert is_narrow([1.0, 1.05] * 4)  # deviation .027 / sqrt(8) = .0094
    assert not is_narrow([1.0, 1.2] * 4)  # .107 / sqrt(8) = .038


def test_times_that_cannot_be_stored_cost_nothing_else(clock, study, monkeypatch, capsys):
    setup, url = study

    def full(*args):
        raise StorageError("disk is full")

    monkeypatch.setattr(quiet_timing, "store_step_timing", full)
    record = update_step_timing(setup, read_study(url, "quiet"), StopRequest())
    assert record.step_timing is not None and record.step_timing.covers(CELLS)
    assert read_study(url, "quiet").step_timing is None
    assert capsys.readouterr().err.endswith(": disk is full\n")
