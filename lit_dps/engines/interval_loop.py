"""The interval loop: trains runs from one check to the next, without Lightning's loop.

A single network trains with the same result as in Lightning's loop, to the bit (`SingleNetwork`).
A stack trains many networks of one batch size at once, of all sparsities (`StackedNetworks`). Their
gradients differ by rounding, which training amplifies. The K of a stacked trial is therefore
another draw from the same distribution.

Attempts train in one stack if their keys and their modules are equal: `batching_key` compares
attempts before they are built, `StackFiller` compares their modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils._pytree import tree_map

from lit_dps.core.attempt import Attempt
from lit_dps.core.trial import LIGHTNING, SINGLE, STACKED, Status, Trial, TrialResult
from lit_dps.data import ImageData
from lit_dps.engines.eligible import ineligibility_reason, reason_of
from lit_dps.engines.engine import Training
from lit_dps.engines.functional import Functional, tensors_of
from lit_dps.engines.module_hooks import NeedsLightning, end_module, optimizer_of
from lit_dps.engines.network_run import CheckOutcome, NetworkRun, build_trial
from lit_dps.engines.run_group import RunGroup
from lit_dps.engines.single_network import SingleNetwork
from lit_dps.engines.stack import StackedNetworks
from lit_dps.engines.trainer import TrainerEngine
from lit_dps.module import ImageClassifier
from lit_dps.optim import RULES, rule_of
from lit_dps.optim.clipping import Clipping
from lit_dps.training.early_check import HardestFirst
from lit_dps.training.hidden_state import preserve_rng_state, unchanged_attributes
from lit_dps.training.workload import Built

# Parameters of the learning rate and its schedule, which may differ between networks of a stack.
RATE_KEYS = frozenset({"model.learning_rate", "model.decay_steps", "model.end_factor"})

# Examples whose loss shows whether two modules differ in more than their weights. Modules of a
# stack have equal arguments except for rates, so a difference appears in the loss of any example.
# In float64, 4 examples of Simple-CNN take 2 ms of CPU.
COMPARED_EXAMPLES = 4
# Relative tolerance of that loss in float64. A penalty of weight 1e-6 changes it by 1e-5.
LOSS_TOLERANCE = 1e-9
# Reason of an attempt whose module differs from the first module of its stack.
DIFFERENT_MODULE = "its module differs from the stack in more than its weights"


class LoopChoice(NamedTuple):
    """The loop that trains a trial.

    Attributes:
        engine: `STACKED`, `SINGLE` or `LIGHTNING`.
        reason: Why it is not a faster loop; empty if it is the fastest that the study allows.
    """

    engine: str
    reason: str = ""


@dataclass(frozen=True)
class IntervalLoop:
    """Trains the attempts that it supports, and the others by Lightning's loop.

    `eligible.ineligibility_reason` decides which trials it supports. The runs of a stack differ in
    initial weights, mask, learning rate, momentum, schedule, order of examples, and end. When a run
    ends, the next attempt takes its row at the same check. Networks, masks, update rules,
    schedules, batches and the goal are equal to those in `TrainerEngine`.

    Attributes:
        training: The settings that the trials share.
        stack_size: The largest number of networks in a stack; 1 trains one run after another.
        intervals_ahead: Check intervals that a stack trains before their checks; None to choose
            them by the device (`RunGroup.choose_intervals`). Results do not depend on it.
    """

    training: Training
    stack_size: int = 1
    intervals_ahead: int | None = None

    def train(
        self,
        next_attempt: Callable[[], Attempt | None],
        at_check: Callable[[], None] = lambda: None,
    ) -> Iterator[TrialResult]:
        """Train attempts until none remains, and yield each result; see `Engine.train`."""
        queue = AttemptQueue(next_attempt, self.stack_size)
        choices: dict[tuple, LoopChoice] = {}
        while True:
            attempt = queue.next()
            if attempt is None:
                return
            assert attempt.trial is not None
            key = batching_key(attempt)
            if key.loop_key not in choices:
                choices[key.loop_key] = self.choose(attempt.trial)
            choice = choices[key.loop_key]
            if choice.engine == LIGHTNING:
                yield self._train_by_lightning(attempt, at_check, choice.reason)
            elif choice.engine == STACKED and queue.has(key):
                yield from self._train_stack(attempt, queue, at_check)
            else:
                result = self._train_single(attempt, at_check, choice.reason)
                if result.engine == LIGHTNING:
                    choices[key.loop_key] = LoopChoice(LIGHTNING, result.engine_reason)
                yield result

    def choose(self, trial: Trial) -> LoopChoice:
        """Return the loop that trains a trial, and why it is not a faster one."""
        reason_against_stack = ""
        if self.stack_size > 1:
            reason = ineligibility_reason(self.training, trial, stacked=True)
            if reason is None:
                return LoopChoice(STACKED)
            reason_against_stack = reason
        reason = ineligibility_reason(self.training, trial)
        if reason is not None:
            return LoopChoice(LIGHTNING, reason)
        return LoopChoice(SINGLE, reason_against_stack)

    def _train_by_lightning(
        self, attempt: Attempt, at_check: Callable[[], None], reason: str
    ) -> TrialResult:
        """Train an attempt by Lightning's loop and return its result."""
        lightning = TrainerEngine(self.training, reason=reason)
        train_one = partial(lightning.train_one, at_check=at_check)
        return self.training.run_attempt(attempt, train_one)

    def _train_single(
        self, attempt: Attempt, at_check: Callable[[], None], reason: str
    ) -> TrialResult:
        """Train one attempt and return its result.

        Args:
            attempt: The attempt.
            at_check: See `Engine.train`.
            reason: Why it is not stacked; empty if no stack is faster, as for a single attempt.
        """
        run_single = partial(self._run_single, at_check=at_check, reason=reason)
        try:
            return self.training.run_attempt(attempt, run_single)
        except NeedsLightning as error:
            # The module has done something for the first time that Lightning's loop alone supports.
            attempt.restart()
            return self._train_by_lightning(attempt, at_check, str(error))

    def _run_single(self, attempt: Attempt, at_check: Callable[[], None], reason: str) -> None:
        """Train one attempt until it ends or pauses."""
        assert attempt.trial is not None
        attempt.set_engine(SINGLE, reason)
        # Random layers, such as dropout, draw from the seed of the point.
        with preserve_rng_state(seed=attempt.trial.seed_for("order")):
            built, device = build_trial(self.training, attempt.trial)
            run = NetworkRun.begin(attempt, built, self.training, device)
            group = RunGroup(SingleNetwork(run), self.training)
            while attempt.status is None:
                (outcome,) = group.outcomes(group.train_intervals(1), 0)
                run.record(outcome)
                group.read_end(0)
                if attempt.status is None:
                    group.end_interval(at_check)
                elif attempt.status is Status.PAUSED:
                    group.save_if_worth_it(0)
            # Lightning leaves these hooks out if a callback saves a paused run and ends it.
            if attempt.status is not Status.PAUSED or run.file is None:
                end_module(run.module)
            attempt.seconds = run.elapsed_seconds()
            attempt.timed = group.stopwatch.timed

    def _train_stack(
        self, first: Attempt, queue: AttemptQueue, at_check: Callable[[], None]
    ) -> Iterator[TrialResult]:
        """Train an attempt in a stack, with the attempts of the queue that have its key."""
        filler = StackFiller(first, queue, self.training)
        with preserve_rng_state():
            runs = filler.next_runs(self.stack_size)
            if runs:
                _seed_dropout(runs[0])
                yield from self._train_runs(runs, filler, at_check)
        for unstacked in filler.unstacked:
            yield self._train_single(unstacked.attempt, at_check, unstacked.reason)

    def _train_runs(
        self, runs: list[NetworkRun], filler: StackFiller, at_check: Callable[[], None]
    ) -> Iterator[TrialResult]:
        """Train runs in a stack, and the next runs in the rows that become empty."""
        networks = StackedNetworks(runs)
        group = RunGroup(networks, self.training)
        while networks.live:
            count = group.choose_intervals(self.intervals_ahead)
            try:
                intervals = group.train_intervals(count)
            except Exception as error:
                # One of the runs caused the error. Training them one at a time shows which.
                for row in networks.live:
                    filler.unstack_after_error(networks.run_at(row).attempt, error)
                return
            for i in range(count):
                for outcome in group.outcomes(intervals, i):
                    result = _record_stacked(group, outcome, filler)
                    if result is not None:
                        yield result
            _fill_empty_rows(networks, group.hardest_first, filler)
            _drop_empty_rows(networks, group.hardest_first)
            if networks.live:
                group.end_interval(at_check)


def _seed_dropout(first: NetworkRun) -> None:
    """Seed what the networks of a stack draw, by the first run.

    A resumed run draws other numbers than it drew at its start.
    """
    assert first.attempt.trial is not None
    seed = first.attempt.trial.seed_for("order")
    torch.manual_seed(hash((seed, first.steps)) % 2**63)


def _record_stacked(
    group: RunGroup, outcome: CheckOutcome, filler: StackFiller
) -> TrialResult | None:
    """Record the check of a stacked run; return its result if it has ended or pauses, else None.

    The row of a run that has ended is empty.
    """
    run = group.networks.run_at(outcome.row)
    attempt = run.attempt
    run.record(outcome)
    if attempt.status is None:
        return None
    try:
        group.read_end(outcome.row)
    except Exception as error:  # a reading of the user may raise anything
        group.networks.runs[outcome.row] = None
        filler.unstack_after_error(attempt, error)
        return None
    if attempt.status is Status.PAUSED:
        group.save_if_worth_it(outcome.row, outcome.number)
    group.networks.runs[outcome.row] = None
    attempt.seconds = run.elapsed_seconds()
    attempt.set_engine(STACKED)
    return attempt.result()


def _fill_empty_rows(
    networks: StackedNetworks, hardest_first: HardestFirst, filler: StackFiller
) -> None:
    """Put the next runs into the empty rows of a stack."""
    for row, run in enumerate(list(networks.runs)):
        if run is None:
            next_run = filler.next_run()
            if next_run is None:
                return
            networks.put(row, next_run)
            hardest_first.begin(row)


def _drop_empty_rows(networks: StackedNetworks, hardest_first: HardestFirst) -> None:
    """Make a stack smaller if at most half of its rows are live.

    An empty row costs as much as a live one, and a new shape costs a little once.
    """
    live = networks.live
    if 0 < 2 * len(live) <= len(networks.runs):
        hardest_first.take(torch.tensor(live, device=hardest_first.priority.device))
        networks.take(live)


class BatchingKey(NamedTuple):
    """What the attempts of a stack have in common. Attempts with equal keys may train together.

    Attributes:
        cell: The batch size and the values of all axes except the axes of pruning.
        kind: The values that decide which loop can train the attempt.
        numbers: The other values, all of them numbers.
    """

    cell: tuple
    kind: tuple
    numbers: tuple

    @property
    def loop_key(self) -> tuple:
        """What decides which loop can train the attempt."""
        return self.cell, self.kind


def batching_key(attempt: Attempt) -> BatchingKey:
    """Return the batching key of an attempt.

    The networks of a stack may differ in weights, mask, learning rate and hyperparameters. All
    other arguments of the module and the data must be equal, such as the arguments of a loss.
    """
    trial = attempt.trial
    assert trial is not None
    network_keys = set(RATE_KEYS)
    for rule in RULES.values():
        network_keys.update(f"model.{name}" for name in rule.hyperparameters)
    kind: list[tuple[str, bool | str]] = []
    numbers: list[tuple[str, float]] = []
    for key, value in sorted(trial.params.items()):
        if key in network_keys:
            continue
        if isinstance(value, float) and not key.startswith("local."):
            # Zero turns a feature off, as in `dropout: 0.0`, which decides on the loop.
            kind.append((key, value != 0))
            numbers.append((key, value))
        else:
            kind.append((key, repr(value)))
    cell = trial.cell.batch_size, trial.cell.stack_axes
    return BatchingKey(cell, tuple(kind), tuple(numbers))


class AttemptQueue:
    """The attempts in the order of the study, with a look ahead for equal keys.

    Args:
        next_attempt: Returns the next attempt of the study, or None at its end.
        max_waiting: Attempts that may wait while an attempt with another key is sought.
    """

    def __init__(self, next_attempt: Callable[[], Attempt | None], max_waiting: int):
        self._next_attempt = next_attempt
        self._max_waiting = max_waiting
        self._waiting: list[Attempt] = []

    def next(self) -> Attempt | None:
        """Return the next attempt, or None if no attempt remains at present."""
        if self._waiting:
            return self._waiting.pop(0)
        return self._next_attempt()

    def next_with(self, key: BatchingKey) -> Attempt | None:
        """Return the next attempt with this key, unless one of another cell comes first."""
        index = self._index(key)
        if index is None:
            return None
        return self._waiting.pop(index)

    def has(self, key: BatchingKey) -> bool:
        """Return True if `next_with` has an attempt."""
        return self._index(key) is not None

    def _index(self, key: BatchingKey) -> int | None:
        """Return the place of the next attempt with this key among the waiting ones."""
        for index in range(self._max_waiting):
            if index == len(self._waiting):
                attempt = self._next_attempt()
                if attempt is None:
                    return None
                self._waiting.append(attempt)
            candidate = batching_key(self._waiting[index])
            if candidate == key:
                return index
            if candidate.cell != key.cell:
                return None
        return None


class Unstacked(NamedTuple):
    """An attempt that leaves its stack and trains as a single network.

    Attributes:
        attempt: The attempt, which begins again.
        reason: Why it leaves the stack, for `TrialResult.engine_reason`.
    """

    attempt: Attempt
    reason: str


class StackFiller:
    """Begins the runs that train in one stack.

    Args:
        first: The first attempt. The others must have its key and its module.
        queue: The further attempts.
        training: The settings of the study.

    Attributes:
        unstacked: Attempts to train one at a time afterwards. Their modules differ from the first
            one, or an error occurred in the stack. The attempt that caused it raises it again, and
            becomes a failed trial.
    """

    def __init__(self, first: Attempt, queue: AttemptQueue, training: Training):
        self.unstacked: list[Unstacked] = []
        self._pending = [first]
        self._key = batching_key(first)
        self._queue = queue
        self._training = training
        self._reference: _Reference | None = None

    def next_runs(self, count: int) -> list[NetworkRun]:
        """Begin the next attempts: `count` runs, or fewer if there are no more."""
        runs = []
        while len(runs) < count:
            run = self.next_run()
            if run is None:
                break
            runs.append(run)
        return runs

    def next_run(self) -> NetworkRun | None:
        """Begin the next attempt that fits into the stack, or resume it from its checkpoint.

        Returns:
            Its run; None if no such attempt remains.
        """
        while True:
            attempt = self._pending.pop() if self._pending else self._queue.next_with(self._key)
            if attempt is None:
                return None
            try:
                run = self._begin(attempt)
            except Exception as error:
                self.unstack_after_error(attempt, error)
                continue
            if run is not None:
                return run
            self.unstacked.append(Unstacked(attempt, DIFFERENT_MODULE))

    def unstack_after_error(self, attempt: Attempt, error: Exception) -> None:
        """Restart an attempt after an error in its stack, and train it one at a time afterwards."""
        attempt.restart()
        self.unstacked.append(Unstacked(attempt, f"an error in its stack: {reason_of(error)}"))

    def _begin(self, attempt: Attempt) -> NetworkRun | None:
        """Return the run of an attempt; None if its module differs from the first module."""
        built, device = build_trial(self._training, attempt.trial)
        if self._reference is None:
            self._reference = _Reference(built, device)
        elif not self._reference.equals(built):
            return None
        return NetworkRun.begin(attempt, built, self._training, device, stacked=True)


class _Reference:
    """The first module of a stack, with which the modules of the other attempts are compared.

    Args:
        built: The module and its data, set up.
        device: Where the modules are compared.
    """

    def __init__(self, built: Built, device: torch.device):
        assert isinstance(built.data, ImageData)
        x, y = built.data.on_device("train", device)
        self._batch = tree_map(_to_double, (x[:COMPARED_EXAMPLES], y[:COMPARED_EXAMPLES]))
        self._device = device
        self._kind = _kind_of(built)
        module = built.module.to(device)
        self._parameters = _double_copies(module.named_parameters())
        self._buffers = _double_copies(module.named_buffers())
        self._loss = self._loss_of(built.module)

    def equals(self, built: Built) -> bool:
        """Return True if a module equals the first module except for its weights."""
        if _kind_of(built) != self._kind:
            return False
        loss = self._loss_of(built.module)
        return torch.allclose(self._loss, loss, rtol=LOSS_TOLERANCE, atol=0)

    @torch.no_grad()
    def _loss_of(self, module: LightningModule) -> Tensor:
        """Return the loss of a module with the weights of the first module."""
        with preserve_rng_state(seed=0):  # so that all modules draw the same dropout
            loss, _ = Functional(module.to(self._device)).call_and_update(
                "loss", self._parameters, self._buffers, self._batch
            )
        return loss


def _kind_of(built: Built) -> tuple:
    """Return what the trials of a stack must have in common: rule, clipping, shapes and images."""
    module, data = built.module, built.data
    assert isinstance(module, ImageClassifier) and isinstance(data, ImageData)
    shapes = {}
    for name, tensor in tensors_of(module).items():
        shapes[name] = tensor.shape, tensor.requires_grad
    with unchanged_attributes(module):  # the module is trained afterwards
        optimizer, _ = optimizer_of(module.configure_optimizers())
    return rule_of(optimizer), Clipping.of(built.trainer), shapes, id(data.images)


def _double_copies(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return copies of tensors by name, floating-point ones in float64."""
    return {name: _to_double(tensor.detach().clone()) for name, tensor in tensors}


def _to_double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
