"""A graph is used only where it takes the same steps faster; here a stand-in for a CUDA graph."""

from __future__ import annotations

import time

import pytest
import torch

from lit_dps.engines.replay import Replay
from lit_dps.engines.stack import Stack
from tests.unit.test_stack import images, member, module

ROUNDS = [torch.arange(60).view(3, 20) // (i + 1) for i in range(4)]
RATES = [torch.full((3, 2), 0.1 / (i + 1)) for i in range(4)]


def stack(rule: str = "momentum") -> Stack:
    return Stack(module(), rule, [member(module(seed), 0.5) for seed in range(2)], 60)


def trained(capture, rule: str = "momentum"):
    """Weights after four intervals, the losses, and the replay."""
    x, y = images()
    replay = Replay(stack(rule), capture)
    losses = [replay.train(x, y, index, rates) for index, rates in zip(ROUNDS, RATES, strict=True)]
    return replay.stack.weights, losses, replay


def slow_once(steps):
    """A graph: the steps themselves, and plain steps seem slower than it."""
    steps(), steps()
    return steps


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A clock in which everything takes as long as the list says, so that the choice is no matter of luck."""
    ticks = iter([0.0, 2.0, 10.0, 11.0] * 10)  # plain 2 s, replay 1 s
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))


@pytest.mark.parametrize("rule", ["sgd", "momentum"])
def test_the_weights_are_those_of_plain_steps(rule):
    plain, losses, _ = trained(None, rule)
    weights, replayed, replay = trained(slow_once, rule)
    assert replay._replay is not None
    torch.testing.assert_close(weights, plain, rtol=0, atol=0)
    for ours, theirs in zip(replayed, losses, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def broken(steps):
    raise RuntimeError("operation not permitted when stream is capturing")


def wrong(steps):
    return lambda: 2 * steps()


def test_a_graph_that_finds_no_memory_does_not_make_plain_steps_smaller():
    def crammed(steps):
        replay.stack.part = 1  # what running out of memory does to it
        raise torch.OutOfMemoryError("no room for a graph")

    replay = Replay(stack(), crammed)
    replay.train(*images(), ROUNDS[0], RATES[0])
    assert replay.stack.part == 60


def nearly(steps):
    return lambda: steps() * (1 + 5e-5)


def test_rounding_makes_no_difference():
    assert trained(nearly)[2]._replay is not None


@pytest.mark.parametrize("capture", [broken, wrong])
def test_a_graph_that_fails_or_differs_is_not_used(capture):
    plain, _, _ = trained(None)
    weights, _, replay = trained(capture)
    assert replay._replay is None
    torch.testing.assert_close(weights, plain, rtol=0, atol=0)


def test_a_slower_graph_is_not_used(monkeypatch):
    ticks = iter([0.0, 1.0, 10.0, 12.0] * 10)
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    assert trained(slow_once)[2]._replay is None


def test_other_rows_need_another_graph():
    x, y = images()
    replay, made = Replay(stack(), lambda steps: made.append(1) or steps), []
    replay.train(x, y, ROUNDS[0], RATES[0])
    replay.train(x, y, ROUNDS[1], RATES[1])
    replay.stack.put(0, member(module(5)))  # in place
    replay.train(x, y, ROUNDS[2], RATES[2])
    assert len(made) == 1
    replay.stack.take(torch.tensor([1]))
    replay.train(x, y, ROUNDS[3], RATES[3][:, :1])
    assert len(made) == 2
