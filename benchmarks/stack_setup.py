"""CPU time that a trial needs in a stack before its first step; scoring passes of a stack."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.numbers import Sample, interleaved
from benchmarks.options import Options
from benchmarks.setups import (
    MOMENTUM_CONFIG,
    devices,
    middle_trial,
    on_cpu,
    on_device,
    paper_setup,
)
from benchmarks.step import now, threads
from benchmarks.text import seconds, table, times
from lit_dps.core.attempt import Attempt
from lit_dps.core.trial import Cell
from lit_dps.engines.network_run import GPU_PASS_BATCH_SIZE, NetworkRun, build_trial
from lit_dps.engines.stack_filler import AttemptQueue, StackFiller
from lit_dps.engines.stacked_scores import scores_of_stack
from lit_dps.engines.trial_settings import TrialSettings
from lit_dps.models import MLP, SimpleCNN
from lit_dps.module import ImageClassifier
from lit_dps.pruning import pruner_of
from lit_dps.pruning.pruner import OneShot
from lit_dps.study.setup import StudySetup
from lit_dps.training.hidden_state import preserve_rng_state

TITLE = "Set-up of a trial in a stack"
BATCH_SIZE = 16
SPARSITIES = (0.0, 0.9)
STACK_SIZE = 100
QUICK_STACK_SIZE = 4
SCORED_NETWORKS = 8
SCORED_BATCHES = 10  # of 100 examples; a whole pass of Simple-CNN takes 25 s of a core
ONE_UNIT = {"class_path": "lit_dps.models.MLP", "init_args": {"hidden": [1]}}


@dataclass(frozen=True)
class Row:
    """CPU seconds of a trial in one kind of stack.

    Attributes:
        network: The network.
        sparsity: Share of pruned parameters; by a method without a scoring pass.
        begin: From the claimed attempt to the run before its first step.
        construction: The constructors of the network and of its module alone.
    """

    network: str
    sparsity: float
    begin: Sample
    construction: Sample

    @property
    def overhead(self) -> Sample:
        """The seconds beyond the constructors."""
        pairs = zip(self.begin.values, self.construction.values, strict=True)
        return Sample(tuple(begin - construction for begin, construction in pairs))


@dataclass(frozen=True)
class ScoreRow:
    """Seconds of a network in a scoring pass of SNIP.

    Attributes:
        network: The network.
        device: "cpu" or "cuda".
        single: By a pass for each network.
        stacked: By one pass for all networks.
    """

    network: str
    device: str
    single: Sample
    stacked: Sample


@dataclass(frozen=True)
class StackSetup:
    """All kinds of stacks, the number of networks in each, and the scoring passes."""

    stack_size: int
    rows: tuple[Row, ...]
    scores: tuple[ScoreRow, ...] = ()


def measure(options: Options) -> StackSetup:
    """Begins the trials of stacks, in turns with their constructors; then scores networks."""
    stack_size = QUICK_STACK_SIZE if options.quick else STACK_SIZE
    paper = on_cpu(paper_setup(options.quick, MOMENTUM_CONFIG))
    model = dict(paper.workload.model)
    model["init_args"] = {**model["init_args"], "network": ONE_UNIT}
    workload = dataclasses.replace(paper.workload, model=model)
    tiny = dataclasses.replace(paper, workload=workload)
    kinds: list[tuple[str, StudySetup, Callable[[], ImageClassifier]]] = [
        ("Simple-CNN", paper, lambda: ImageClassifier(SimpleCNN())),
        ("one hidden unit", tiny, lambda: ImageClassifier(MLP(hidden=(1,)))),
    ]
    rows = []
    scores = []
    with threads(1):
        for name, setup, construct in kinds:
            for sparsity in SPARSITIES:
                variants = {
                    "begin": partial(begin_seconds, setup, sparsity, stack_size),
                    "construction": partial(construction_seconds, construct, stack_size),
                }
                begin_seconds(setup, sparsity, 2)  # it reads the data
                rows.append(Row(name, sparsity, **interleaved(variants, options.repeats)))
        for name, setup, _ in kinds:
            for device in devices():
                scores.append(_score_row(name, on_device(setup, device), device, options))
    return StackSetup(stack_size, tuple(rows), tuple(scores))


def _score_row(name: str, setup: StudySetup, device: str, options: Options) -> ScoreRow:
    """Score the networks of a stack by one pass, in turns with a pass for each network."""
    pruning = dataclasses.replace(setup.pruning, method="snip")
    if device == "cpu":
        pruning = dataclasses.replace(pruning, options={"batches": SCORED_BATCHES})
    training = TrialSettings(setup.workload, setup.goal, pruning)
    runs = []
    for point in range(SCORED_NETWORKS):
        attempt = Attempt(middle_trial(setup, Cell(BATCH_SIZE, 0.9), point), setup.goal.build())
        built, place = build_trial(training, attempt.study_trial)
        runs.append(NetworkRun.build_or_resume(attempt, built, training, place))

    def single() -> float:
        begin = now(device)
        for run in runs:
            assert run.attempt.trial is not None
            config = training.resolve(run.attempt.trial).pruning
            pruner = pruner_of(config.method, config.options)
            assert isinstance(pruner, OneShot)
            size = config.batch_size if device == "cpu" else GPU_PASS_BATCH_SIZE
            with run.copy_to_prune(config, size) as network:
                pruner.scores(network, torch.Generator())
        return (now(device) - begin) / len(runs)

    def stacked() -> float:
        begin = now(device)
        scores_of_stack(runs, training)
        return (now(device) - begin) / len(runs)

    single()  # it loads kernels, and the data
    stacked()
    seconds_by_way = interleaved({"single": single, "stacked": stacked}, options.repeats)
    return ScoreRow(name, device, **seconds_by_way)


def show(found: StackSetup) -> str:
    """The rows as markdown."""
    rows = []
    for row in found.rows:
        numbers = [seconds(row.begin), seconds(row.construction), seconds(row.overhead)]
        rows.append([row.network, f"{row.sparsity:g}", *numbers])
    head = ["network", "S", "set-up", "of it constructors", "the rest"]
    text = f"CPU time of a trial, in a stack of {found.stack_size} at B = {BATCH_SIZE}, from the "
    text += "claimed attempt to its first step. Pruning is by magnitude, without a scoring pass."
    text = f"{text}\n\n{table(head, rows)}"
    if not found.scores:
        return text
    rows = []
    for score in found.scores:
        gain = times(score.single.over(score.stacked))
        numbers = [seconds(score.single), seconds(score.stacked), gain]
        rows.append([score.network, score.device, *numbers])
    head = ["network", "device", "single passes", "one pass for all", "gain"]
    text += f"\n\nSeconds of a network in a pass of SNIP, {SCORED_NETWORKS} networks; on the CPU "
    text += f"{SCORED_BATCHES} batches on one thread, on a GPU all."
    return f"{text}\n\n{table(head, rows)}"


def begin_seconds(setup: StudySetup, sparsity: float, stack_size: int) -> float:
    """CPU seconds in which the engine begins a trial of a stack."""
    pruning = dataclasses.replace(setup.pruning, method="magnitude")
    training = TrialSettings(setup.workload, setup.goal, pruning)
    begin = time.process_time()
    runs = begin_runs(setup, training, sparsity, stack_size)
    taken = time.process_time() - begin
    if len(runs) != stack_size:
        raise RuntimeError(f"{len(runs)} of {stack_size} trials are in the stack")
    return taken / stack_size


def begin_runs(
    setup: StudySetup, training: TrialSettings, sparsity: float, stack_size: int
) -> list[NetworkRun]:
    """The runs of a stack, before their first step."""
    attempts = []
    for point in range(stack_size):
        trial = middle_trial(setup, Cell(BATCH_SIZE, sparsity), point)
        attempts.append(Attempt(trial, setup.goal.build()))
    first = attempts.pop(0)
    queue = AttemptQueue(lambda: attempts.pop(0) if attempts else None, stack_size)
    with preserve_rng_state():
        return StackFiller(first, queue, training).next_runs(stack_size)


def construction_seconds(construct: Callable[[], ImageClassifier], count: int) -> float:
    """CPU seconds of the constructors of a module."""
    begin = time.process_time()
    for _ in range(count):
        construct()
    return (time.process_time() - begin) / count
