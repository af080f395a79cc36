"""Stacked trials (`study.engine: stacked`) beside the same trials one at a time, by network, batch
size and slots."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.numbers import Sample, interleaved
from benchmarks.options import Options
from benchmarks.setups import UNREACHABLE, devices, middle_trial, on_device, paper_setup
from benchmarks.step import now, threads
from benchmarks.text import NO_GPU, spread, table, times
from lit_dps.core.attempt import Attempt
from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell, Trial
from lit_dps.engines.trial_engine import TrialEngine
from lit_dps.engines.trial_settings import TrialSettings
from lit_dps.study.setup import StudySetup

TITLE = "Stacked trials"
NETWORKS = ("SimpleCNN", "MLP")
SIZES = {
    "cpu": ((2, 16, 128), (4, 16)),
    "cuda": ((2, 16, 64, 1024, 16384), (16, 100, 400)),
}  # batch sizes, slots
STEPS = 32  # of a trial, with a check every 16 that stops early
SQUARE = 2048  # rows of the matrix product whose rate stands for what the device can do
TARGET = 30  # of stacked trials over one at a time on a GPU at B <= 64


@dataclass(frozen=True)
class Row:
    """One network, batch size and number of trials at a time.

    Attributes:
        device: "cpu" or "cuda".
        network: Its class.
        batch_size: Examples a step.
        slots: Trials at a time.
        alone: Trial-steps a second of the interval loop, one trial after another: the baseline.
        fused: Trial-steps a second of the interval loop with so many slots.
        ratio: Stacked over alone.
        share: Arithmetic of the stack's training steps, over that of a large matrix product
            in the same time.
    """

    device: str
    network: str
    batch_size: int
    slots: int
    alone: Sample
    fused: Sample
    ratio: Sample
    share: Sample


@dataclass(frozen=True)
class Lockstep:
    """All rows, with so many steps a trial and one CPU thread."""

    workload: str
    steps: int
    rows: tuple[Row, ...]


def measure(options: Options) -> Lockstep:
    """Trial-steps a second of both engines, in turns; half of the trials are dense, half 90 %
    sparse."""
    setup, rows = paper_setup(options.quick), []
    with threads(1):
        for device in devices():
            sizes, slots = ((16,), (2,)) if options.quick else SIZES[device]
            for network in NETWORKS[-1:] if options.quick else NETWORKS:
                used = on_device(with_network(setup, network), device)
                rows += [_row(used, device, network, b, n, options) for b in sizes for n in slots]
    return Lockstep(setup.workload_name(), STEPS, tuple(rows))


def show(found: Lockstep) -> str:
    """A row a case."""
    head = [
        "device",
        "network",
        "B",
        "slots",
        "alone, steps/s",
        "stacked, steps/s",
        "ratio",
        "of a matrix product",
    ]
    rows = [
        [
            *(row.device, row.network, row.batch_size, row.slots),
            *(
                spread(row.alone, "{:,.0f}".format),
                spread(row.fused, "{:,.0f}".format),
                times(row.ratio),
            ),
            spread(row.share, "{:.1%}".format),
        ]
        for row in found.rows
    ]
    networks = " and ".join(dict.fromkeys(row.network for row in found.rows))
    text = (
        f"{found.workload} with {networks}, {found.steps} steps a trial with two checks that stop "
        "early, one CPU thread; all of an engine's work but the score of pruning, which is "
        "magnitude here. That includes the start of a stack, which compares its updates with the "
        "optimizer. Baseline: one trial after another. Steps are counted over all trials. "
        "`study.engine: auto` trains one after another on a CPU."
    )
    gpu = (
        f"On a GPU: {NO_GPU}; so are the target of x{TARGET} there at B <= 64, the share of its "
        "peak, and the full "
        "workload of 56 cells x 100 trials."
    )
    return f"{text}\n\n{table(head, rows)}" + (
        "" if any(r.device == "cuda" for r in found.rows) else f"\n\n{gpu}"
    )


def with_network(setup: StudySetup, network: str) -> StudySetup:
    """The setup with another of the paper's networks."""
    arguments = {
        **setup.workload.model["init_args"],
        "network": {"class_path": f"lit_dps.models.{network}"},
    }
    return replace(
        setup,
        workload=replace(setup.workload, model={**setup.workload.model, "init_args": arguments}),
    )


def _row(
    setup: StudySetup, device: str, network: str, batch_size: int, slots: int, options: Options
) -> Row:
    goal = replace(
        setup.goal,
        error=UNREACHABLE,
        check_interval=16,
        max_steps=STEPS,
        early_reject=True,
    )
    training = TrialSettings(setup.workload, goal, replace(setup.pruning, method="magnitude"))
    one, fused = TrialEngine(training), TrialEngine(training, slots)
    cells = [Cell(batch_size, 0.9 if i % 2 else 0.0) for i in range(slots)]
    stop = goal.build()
    trials = [(middle_trial(setup, cell, point), stop) for point, cell in enumerate(cells)]
    for engine in (one, fused):
        rate(
            engine, trials[:2], device
        )  # what is done once a process is done before the first repeat
    repeats = min(options.repeats, 3)
    found = interleaved(
        {
            "alone": lambda: rate(one, trials, device),
            "fused": lambda: rate(fused, trials, device),
            "product": lambda: product_rate(device),
        },
        repeats,
    )
    arithmetic = Sample(tuple(r * step_flops(setup, batch_size) for r in found["fused"].values))
    ratio, share = found["fused"].over(found["alone"]), arithmetic.over(found["product"])
    return Row(device, network, batch_size, slots, found["alone"], found["fused"], ratio, share)


def rate(engine: TrialEngine, trials: Iterable[tuple[Trial, Goal]], device: str) -> float:
    """Optimizer steps a second, over all trials and all that an engine does for them."""
    begin = now(device)
    runs = iter([*(Attempt(*trial) for trial in trials), *[None] * 1000])
    steps = 0
    for result in engine.train(runs.__next__):
        if result.engine_reason:  # such a trial was not stacked
            raise RuntimeError(result.engine_reason)
        steps += result.steps_run
    return steps / (now(device) - begin)


def step_flops(setup: StudySetup, batch_size: int) -> int:
    """Floating-point operations of a training step of one network, forward and backward."""
    built: Any = setup.workload.build(middle_trial(setup, Cell(batch_size, 0.0)))
    built.data.setup("fit")
    x, y = (tensor[:1] for tensor in built.data.on_device("train", torch.device("cpu")))
    with FlopCounterMode(display=False) as counter:
        built.module.loss((x, y)).backward()
    return counter.get_total_flops() * batch_size


def product_rate(device: str) -> float:
    """Floating-point operations a second of a large matrix product, in the precision that networks
    train with."""
    a, b = (torch.randn(SQUARE, SQUARE, device=device) for _ in range(2))
    a @ b
    begin, count = now(device), 0
    while time.perf_counter() - begin < 0.2:
        a @ b
        count += 1
    return 2 * SQUARE**3 * count / (now(device) - begin)
