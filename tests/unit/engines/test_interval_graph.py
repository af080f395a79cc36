"""Steps of a stack that are captured and repeated: the same updates, or no graph.

A CPU has no graphs. Here work is captured as a function that does it again, on the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

from lit_dps.core.trial import Cell, Status
from lit_dps.engines import stack
from lit_dps.engines.interval_graph import GraphedSteps
from lit_dps.module import ImageClassifier
from tests.support.runs import train
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.engines.test_intervals_ahead import GOAL, facts
from tests.unit.engines.test_stack_rows import RATES, trials, workload

Work = Callable[[], None]


class Captures:
    """Captures work as a graph would, and counts.

    Attributes:
        captured: How often work was captured.
        replays: How often it was repeated.
    """

    def __init__(self, change: Callable[[Work], Work] = lambda work: work):
        self.captured = 0
        self.replays = 0
        self._change = change

    def __call__(self, work: Work) -> Work:
        self.captured += 1
        work()
        changed = self._change(work)

        def replay() -> None:
            self.replays += 1
            changed()

        return replay


@pytest.fixture
def capture(monkeypatch) -> Callable[[Captures], Captures]:
    """Capture the steps of all stacks of a test, and collect what takes their steps."""

    def use(captures: Captures) -> Captures:
        monkeypatch.setattr(stack, "capture_for", lambda device: captures)
        return captures

    return use


@pytest.fixture
def graphed(monkeypatch) -> list[GraphedSteps]:
    made = []

    class Collected(GraphedSteps):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(stack, "GraphedSteps", Collected)
    return made


# Each value once; the rest of the product is a long form.
BRIEF = {("authors", 1, "momentum"), ("per_trial", 3, "adam")}
PRODUCT = product(("authors", "per_trial"), (1, 3), (("momentum", 2), ("adam", 0)))


@pytest.mark.parametrize(
    ("order", "ahead", "rule", "delay"),
    [
        pytest.param(
            order, m, *rule, marks=[] if (order, m, rule[0]) in BRIEF else pytest.mark.long
        )
        for order, m, rule in PRODUCT
    ],
)
def test_graphs_train_as_steps_one_by_one(capture, graphed, order, ahead, rule, delay):
    used = workload(
        data={"order": order}, optimizer=rule, schedule="linear", decay_steps=60, end_factor=0.1
    )
    asked = trials(Cell(16, 0.0), Cell(16, 0.9), rates=[*RATES, 0.001])
    options = {
        "size": 5,
        "optim": {"delay": delay},
    }  # fewer rows than trials: rows are filled again
    expected = train(asked, used, GOAL, ahead=ahead, **options)
    captures = capture(Captures())
    assert facts(train(asked, used, GOAL, ahead=ahead, **options)) == facts(expected)
    assert graphed[-1].reason == ""
    assert captures.captured >= 2, "a smaller stack has other tensors, and other graphs"
    assert captures.replays > 20


def test_a_graph_that_misses_new_batches_is_not_used(capture, graphed):
    """A graph of constants makes the first update again and again."""

    def frozen(work: Work) -> Work:
        return lambda: None  # the graph changes nothing

    asked = trials(Cell(16, 0.0), rates=[0.01, 0.02])
    expected = train(asked, workload(), GOAL, size=4)
    captures = capture(Captures(frozen))
    assert facts(train(asked, workload(), GOAL, size=4)) == facts(expected)
    assert captures.replays == 1 and "updates" in graphed[-1].reason


def test_steps_that_cannot_be_captured_are_taken_one_by_one(capture, graphed):
    def fail(work: Work) -> Work:
        work()
        raise RuntimeError("operation not permitted when stream is capturing")

    asked = trials(Cell(16, 0.9), rates=[0.01, 0.02])
    expected = train(asked, workload(), GOAL, size=4)
    captures = capture(Captures(fail))
    assert facts(train(asked, workload(), GOAL, size=4)) == facts(expected)
    assert captures.captured == 1 and "capturing" in graphed[-1].reason


class Dropping(ImageClassifier):
    """Its network drops a quarter of its inputs."""

    def __init__(self, network: torch.nn.Module, learning_rate: float = 0.01):
        super().__init__(
            torch.nn.Sequential(torch.nn.Dropout(0.25), network), learning_rate=learning_rate
        )


def test_steps_that_draw_random_numbers_have_no_graph(capture, graphed):
    captures = capture(Captures())
    used = workload(class_path="tests.unit.engines.test_interval_graph.Dropping")
    del used.model["init_args"]["optimizer"]
    asked = trials(Cell(16, 0.0), rates=[0.01, 0.02])
    for trial in asked:
        del trial.params["model.momentum"]
    results = train(asked, used, GOAL, size=4)
    assert {result.engine for result in results} == {"stacked"}
    assert captures.replays == 0 and "random" in graphed[-1].reason


def test_a_network_without_company_is_a_stack_of_one_where_that_is_faster(capture):
    captures = capture(Captures())
    asked = trials(Cell(16, 0.5), rates=[0.02])
    (alone,) = train(asked, workload(), GOAL, size=4)
    assert (alone.engine, captures.replays) == ("single", 0)
    (stacked,) = train(asked, workload(), GOAL, size=4, stacks_alone=True)
    assert (stacked.engine, stacked.status, stacked.steps) == (
        "stacked",
        Status.COMPLETE,
        alone.steps,
    )
    assert stacked.curve["train_loss"] == pytest.approx(alone.curve["train_loss"], rel=2e-3)
    assert captures.replays > 2


def test_long_intervals_are_captured_in_parts(capture, graphed, monkeypatch):
    monkeypatch.setattr("lit_dps.engines.interval_graph.MAX_GRAPH_STEPS", 3)
    goal = {**GOAL, "check_interval": 8}  # parts of 3, 3 and 2 steps
    asked = trials(Cell(16, 0.5), rates=[0.01, 0.0005])
    expected = train(asked, workload(), goal, size=4)
    captures = capture(Captures())
    assert facts(train(asked, workload(), goal, size=4)) == facts(expected)
    assert captures.captured % 2 == 0, "parts of 3 and of 2 steps have a graph each"
    assert captures.replays > 10
