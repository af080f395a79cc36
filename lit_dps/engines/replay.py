"""Replay: all steps of a check interval as one CUDA graph, where that is right and faster.

At small batch sizes a GPU waits for the processor to launch kernels; a graph launches all of them at once. What a
capture cannot hold differs between networks, so a graph is used only after it gave the weights of the plain steps, in
less time. No GPU was at hand when this was written: the tests run it with a stand-in for the graph, and no gain is
claimed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from lit_dps.engines.stack import Stack

CLOSE = 1e-4  # of the largest number, between the weights after an interval by the graph and by plain steps
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


def cuda_graph(steps: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Captures a function on tensors that stay where they are; what it returns replays it.

    Raises:
        RuntimeError: if it does something that a graph cannot hold.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # lazy initialization must not be captured
        for _ in range(2):
            steps()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = steps()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


class Replay:
    """Trains a stack, by a graph where that pays.

    Args:
        stack: The networks.
        capture: Makes the graph; None never does.
    """

    def __init__(self, stack: Stack, capture: Capture | None = None):
        self.stack, self.capture = stack, capture
        self._kind: tuple | None = None
        self._replay: Callable[[], Tensor] | None = None

    @classmethod
    def on(cls, stack: Stack) -> Replay:
        """With graphs on a GPU."""
        return cls(stack, cuda_graph if stack.weights.device.type == "cuda" else None)

    def train(self, x: Tensor, y: Tensor, index: Tensor, rates: Tensor) -> Tensor:
        """As `Stack.train`."""
        if self.capture is None:
            return self.stack.train(x, y, index, rates)
        kind = (self.stack.weights.data_ptr(), index.shape)  # other tensors need another graph
        if kind != self._kind:
            self._kind = kind
            return self._first(x, y, index, rates)
        if self._replay is None:
            return self.stack.train(x, y, index, rates)
        self._index.copy_(index)
        self._rates.copy_(rates)
        return self._replay().clone()

    def _first(self, x: Tensor, y: Tensor, index: Tensor, rates: Tensor) -> Tensor:
        """Takes the steps plainly, and finds out whether a graph takes the same ones faster."""
        self._replay, self._index, self._rates = None, index.clone(), rates.clone()
        before, part = self._state(), self.stack.part
        loss, plain = self._timed(lambda: self.stack.train(x, y, index, rates))
        after = self._state()
        try:
            self._restore(before)
            replay = self.capture(lambda: self.stack.train(x, y, self._index, self._rates))
            self._restore(before)
            same, replayed = self._timed(replay)
            alike = all(_alike(a, b) for a, b in zip([same, *self._state()], [loss, *after], strict=True))
            if alike and replayed < plain:
                self._replay = replay
        except RuntimeError:  # also out of memory: the plain steps fitted
            self.stack.part = part
        self._restore(after)
        return loss

    def _state(self) -> list[Tensor]:
        return [t.clone() for t in (self.stack.weights, self.stack.accumulators) if t is not None]

    def _restore(self, state: list[Tensor]) -> None:
        for tensor, kept in zip((self.stack.weights, self.stack.accumulators), state, strict=False):
            tensor.copy_(kept)

    def _timed(self, call: Callable[[], Tensor]) -> tuple[Tensor, float]:
        self._synchronize()
        begin = time.perf_counter()
        loss = call().clone()
        self._synchronize()
        return loss, time.perf_counter() - begin

    def _synchronize(self) -> None:
        if self.stack.weights.device.type != "cpu":
            torch.accelerator.synchronize()


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether tensors differ by no more than kernels that add up in another order."""
    largest = other[other.isfinite()].abs().max().item() if other.isfinite().any() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=CLOSE * largest, equal_nan=True)
