"""GraphedSteps: trains the intervals of a stack by CUDA graphs.

A step of a small network is a hundred kernels, and the host needs longer to launch them than the
device to run them. A graph is launched at once. It reads and writes the same tensors each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_

from lit_dps.core.errors import first_line
from lit_dps.engines.row_tensors import Rows, StepNumbers
from lit_dps.engines.snapshots import changing_tensors
from lit_dps.training.hidden_state import capture_rng_state, equal_states

# Takes the step of a batch with its numbers, in place, and returns the losses before it.
Step = Callable[[Tensor, StepNumbers], Tensor]
# Makes a repeatable piece of work, and returns a function that repeats it.
Capture = Callable[[Callable[[], None]], Callable[[], None]]
# Steps of a graph. The launch of more steps takes no less time for each, and capturing them does.
MAX_GRAPH_STEPS = 32
# Largest distance between the updates of a graph and of single steps, relative to the update. An
# interval amplifies the rounding of float32 (1e-7), and a graph of other steps is 1 away.
TOLERANCE = 0.01


def capture_cuda(work: Callable[[], None]) -> Callable[[], None]:
    """Return a function that repeats work on a CUDA device by one launch. It does the work once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # libraries allocate their workspaces in the first steps
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def capture_for(device: torch.device) -> Capture | None:
    """Return how work on a device is captured; None if the device has no graphs."""
    if device.type == "cuda":
        return capture_cuda
    return None


class IntervalGraph:
    """Takes several steps of a stack by one launch.

    Args:
        step: Takes one step. It must not wait for the device, nor depend on numbers of the host
            that change between two intervals.
        tensors: The tensors that `step` changes in place; here they are restored.
        index: Batches of an interval, whose shape all intervals have.
        numbers: The numbers of their steps.
        capture: How the steps are captured.

    Raises:
        RuntimeError: If the steps cannot be captured.
    """

    def __init__(
        self,
        step: Step,
        tensors: Sequence[Tensor],
        index: Tensor,
        numbers: StepNumbers,
        capture: Capture,
    ):
        self._index = index.clone()
        self._numbers: StepNumbers = tree_map(torch.clone, numbers)
        self._losses: Tensor | None = None

        def work() -> None:
            for i, batch in enumerate(self._index):
                self._losses = step(batch, self._numbers.at(i))

        before = [tensor.clone() for tensor in tensors]
        try:
            self._replay = capture(work)
        finally:
            restore(tensors, before)

    def train(self, index: Tensor, numbers: StepNumbers) -> Tensor:
        """Take the steps of an interval; return the losses before the last one, shape (rows,)."""
        self._index.copy_(index)
        tree_map_(lambda ours, new: ours.copy_(new), self._numbers, numbers)
        self._replay()
        assert self._losses is not None
        return self._losses.clone()


def restore(tensors: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    """Copy earlier values into tensors."""
    for tensor, value in zip(tensors, before, strict=True):
        tensor.copy_(value)


def same_update(before: Tensor, ours: Tensor, theirs: Tensor) -> bool:
    """Return True if two loops that began with the same weights made the same update.

    Half of the networks must agree, because rounding makes a diverging network chaotic.

    Args:
        before: Weights before the update, shape (rows, parameters).
        ours, theirs: Weights after it, of the same shape.
    """
    distance = (ours - theirs).norm(dim=1)
    update = (theirs - before).norm(dim=1)
    is_finite = distance.isfinite() & update.isfinite()
    if not is_finite.any():
        return True
    agrees = distance[is_finite] <= TOLERANCE * update[is_finite]
    return bool(agrees.float().mean() >= 0.5)


class GraphedSteps:
    """Takes the steps of intervals one by one, and by graphs once these make the same updates.

    Intervals are divided into parts of at most `MAX_GRAPH_STEPS`. The steps of the first part of a
    shape are captured. At the second part the graph and single steps begin at the same weights, and
    are compared. So a graph that misses a change of its batches or numbers is not used.

    Args:
        step: As in `IntervalGraph`.
        capture: As in `IntervalGraph`; None to take all steps one by one.

    Attributes:
        reason: Why no graph is used; empty if graphs are used, or if `capture` is None.
    """

    def __init__(self, step: Step, capture: Capture | None):
        self.reason = ""
        self._step = step
        self._capture = capture
        self._graphs: dict[torch.Size, IntervalGraph] = {}
        self._proven: set[torch.Size] = set()

    def forget(self) -> None:
        """Forget all graphs, because the tensors of the stack are others now."""
        self._graphs.clear()
        self._proven.clear()

    def train(self, tensors: Rows, index: Tensor, numbers: StepNumbers) -> Tensor:
        """Take the steps of an interval; return the losses before the last one, shape (rows,).

        Args:
            tensors: The tensors of the stack, which the steps change in place.
            index: Batches, shape (steps, batch) or (steps, rows, batch).
            numbers: The numbers of the steps.
        """
        losses = None
        for start in range(0, len(index), MAX_GRAPH_STEPS):
            part = slice(start, start + MAX_GRAPH_STEPS)
            losses = self._train_part(tensors, index[part], numbers.at(part))
        assert losses is not None
        return losses

    def _train_part(self, tensors: Rows, index: Tensor, numbers: StepNumbers) -> Tensor:
        """Take the steps of a part of an interval; see `train`."""
        shape = index.shape
        if self._capture is None or self.reason:
            return self._one_by_one(index, numbers)
        if shape in self._proven:
            return self._graphs[shape].train(index, numbers)
        if shape in self._graphs:
            return self._compare(tensors, index, numbers)
        try:
            self._graphs[shape] = IntervalGraph(
                self._step, tree_leaves(changing_tensors(tensors)), index, numbers, self._capture
            )
        except RuntimeError as error:
            self.reason = f"a CUDA graph cannot capture the steps: {first_line(error)}"
        state = capture_rng_state()
        losses = self._one_by_one(index, numbers)
        if not equal_states(state, capture_rng_state()):
            self.reason = (
                "the steps draw random numbers, so a CUDA graph cannot be compared with them"
            )
        return losses

    def _one_by_one(self, index: Tensor, numbers: StepNumbers) -> Tensor:
        losses = None
        for i, batch in enumerate(index):
            losses = self._step(batch, numbers.at(i))
        assert losses is not None
        return losses

    def _compare(self, tensors: Rows, index: Tensor, numbers: StepNumbers) -> Tensor:
        """Take the steps by the graph, undo them, and take them one by one; compare the weights."""
        changed = tree_leaves(changing_tensors(tensors))
        before = [tensor.clone() for tensor in changed]
        weights_before = tensors.weights.clone()
        self._graphs[index.shape].train(index, numbers)
        weights = tensors.weights.clone()
        restore(changed, before)
        losses = self._one_by_one(index, numbers)
        if same_update(weights_before, weights, tensors.weights):
            self._proven.add(index.shape)
        else:
            self.reason = "the updates of a CUDA graph differ from the updates of single steps"
        return losses
