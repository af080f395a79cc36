"""One optimizer step: the interval loop and Lightning's beside a bare loop in PyTorch, all with the
same kernels."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.numbers import Sample, interleaved
from benchmarks.options import Options
from benchmarks.setups import UNREACHABLE, devices, middle_trial, on_device, paper_setup, run_trial
from benchmarks.text import NO_GPU, seconds, table, times
from lit_dps.core.trial import Cell, Trial
from lit_dps.data.loaders import batches
from lit_dps.pruning import prunable, top_k
from lit_dps.study.setup import StudySetup
from lit_dps.training.workload import Built, Workload

TITLE = "An optimizer step"
CELLS = tuple(
    Cell(batch_size, sparsity) for sparsity in (0.0, 0.9) for batch_size in (2, 16, 128, 1024)
)
BARE, LEAN, LIGHTNING = "bare", "lean", "lightning"
TARGET = 1.10  # of lean over bare
WARM = 3  # steps before the clock starts: threads, caches and kernels are there then
FEWEST = 4  # steps to time, however long they take


@dataclass(frozen=True)
class Row:
    """Seconds a step in one cell.

    Attributes:
        device: "cpu" or "cuda".
        batch_size: Examples a step.
        sparsity: Share of pruned parameters.
        steps: Steps that each repeat timed.
        bare: Seconds a step of a loop written by hand: the baseline.
        lean: Seconds a step of a trial in the interval loop.
        lightning: Seconds a step of a trial in Lightning's own loop.
        lean_ratio: Lean over bare.
        lightning_ratio: Lightning's over bare.
    """

    device: str
    batch_size: int
    sparsity: float
    steps: int
    bare: Sample
    lean: Sample
    lightning: Sample
    lean_ratio: Sample
    lightning_ratio: Sample


@dataclass(frozen=True)
class Steps:
    """All cells of all devices, with so many CPU threads."""

    workload: str
    threads: int
    rows: tuple[Row, ...]


def measure(options: Options) -> Steps:
    """Seconds a step in each cell, with one thread, the three loops in turns."""
    setup = paper_setup(options.quick)
    cells = [Cell(16, 0.0), Cell(16, 0.9)] if options.quick else CELLS
    with threads(1):
        rows = [
            _row(on_device(setup, device), device, cell, options)
            for device in devices()
            for cell in cells
        ]
    return Steps(setup.workload_name(), 1, tuple(rows))


def show(found: Steps) -> str:
    """A row a cell."""
    head = [
        "device",
        "B",
        "S",
        "bare",
        "lean",
        "Lightning",
        "lean / bare",
        "target, at most",
        "Lightning / bare",
    ]
    rows = [
        [
            *(
                row.device,
                row.batch_size,
                f"{row.sparsity:g}",
                seconds(row.bare),
                seconds(row.lean),
            ),
            *(seconds(row.lightning), times(row.lean_ratio)),
            f"x{TARGET:.2f}: {'met' if row.lean_ratio.median <= TARGET else 'missed'}",
            times(row.lightning_ratio),
        ]
        for row in found.rows
    ]
    text = (
        f"{found.workload}, {found.threads} thread, no check within the time. Baseline: a bare "
        "loop in PyTorch over "
        "the same tensors in memory (index, cross-entropy, backward, `torch.optim.SGD`; at S > 0 "
        "the gradients times "
        "the mask). Lean and Lightning: a trial in the interval loop and in Lightning's "
        "(`study.engine` single and lightning)."
    )
    gpu = "" if any(row.device == "cuda" for row in found.rows) else f"\n\nOn a GPU: {NO_GPU}."
    return f"{text}\n\n{table(head, rows)}{gpu}"


def _row(setup: StudySetup, device: str, cell: Cell, options: Options) -> Row:
    trial = middle_trial(setup, cell)
    for lean in (True, False):
        engine(
            setup, trial, WARM + FEWEST, lean
        )  # what is done once a process is done before the first repeat
    once = bare(setup, trial, WARM + FEWEST, device)[0]
    steps = max(FEWEST, round(options.seconds / once))
    found = interleaved(
        {
            BARE: lambda: bare(setup, trial, WARM + steps, device)[0],
            LEAN: lambda: engine(setup, trial, WARM + steps, lean=True)[0],
            LIGHTNING: lambda: engine(setup, trial, WARM + steps, lean=False)[0],
        },
        options.repeats,
    )
    ratios = [found[name].over(found[BARE]) for name in (LEAN, LIGHTNING)]
    return Row(
        device,
        cell.batch_size,
        cell.sparsity,
        steps,
        found[BARE],
        found[LEAN],
        found[LIGHTNING],
        *ratios,
    )


def bare(setup: StudySetup, trial: Trial, steps: int, device: str) -> tuple[float, nn.Module]:
    """Trains a trial's network for so many steps in a loop written by hand, without any check.

    Returns:
        Seconds a step, from the update of step `WARM` to that of the last; and the network.
    """
    built: Any = setup.workload.build(trial)
    built.data.setup("fit")
    images, module = built.data.images, built.module
    network = module.network.to(
        device, memory_format=torch.channels_last if device == "cpu" else torch.preserve_format
    )
    x, y = images.x["train"].to(device), images.y["train"].to(device)
    order = [
        index.to(device)
        for index in itertools.islice(batches(built.data.epochs(), trial.cell.batch_size), steps)
    ]
    pairs: list[tuple[Tensor, Tensor]] = []
    if trial.cell.sparsity > 0:
        magnitudes = {
            name: p.detach().abs() for name, p in prunable(module, setup.pruning.biases).items()
        }
        mask = top_k(magnitudes, trial.cell.sparsity)
        mask.apply_to_weights(module)
        parameters = dict(module.named_parameters())
        pairs = [(parameters[name], keep.to(device)) for name, keep in mask.items()]
    optimizer = torch.optim.SGD(network.parameters(), lr=module.hparams.learning_rate)
    begin = 0.0
    for step, index in enumerate(order, start=1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(x[index]), y[index])
        loss.backward()
        for parameter, keep in pairs:
            assert parameter.grad is not None
            parameter.grad.mul_(keep)
        if step == WARM:
            begin = now(device)
        elif step == steps:
            end = now(device)
        optimizer.step()
    return (end - begin) / (steps - WARM), network


def engine(setup: StudySetup, trial: Trial, steps: int, lean: bool) -> tuple[float, nn.Module]:
    """Trains a trial for so many steps by one of the engines.

    The only check, at the end, comes after the clock has stopped, and stops early itself.

    Returns:
        As `bare`.
    """
    goal = dataclasses.replace(
        setup.goal,
        error=UNREACHABLE,
        check_interval=steps,
        max_steps=steps,
        early_reject=True,
    )
    kept = Kept(**vars(setup.workload))
    # The masks of the bare loop, and no pass to wait for.
    pruning = dataclasses.replace(setup.pruning, method="magnitude")
    stamps: list[float] = []
    device = "cuda" if setup.workload.trainer.get("accelerator") == "gpu" else "cpu"

    def stamp(*args: object) -> None:
        stamps.append(now(device) if len(stamps) in (WARM - 1, steps - 1) else 0.0)

    hook = register_optimizer_step_post_hook(stamp)  # asked once a step in both loops
    try:
        run_trial(dataclasses.replace(setup, workload=kept, pruning=pruning), trial, goal, lean)
    finally:
        hook.remove()
    trained: Any = kept.modules[-1]
    return (stamps[steps - 1] - stamps[WARM - 1]) / (steps - WARM), trained.network


@dataclass(frozen=True)
class Kept(Workload):
    """A workload that keeps the modules it has built."""

    modules: list[LightningModule] = field(default_factory=list, compare=False)

    def build(self, trial: Trial) -> Built:
        built = super().build(trial)
        self.modules.append(built.module)
        return built


def now(device: str) -> float:
    """The clock, once the device has done what it was told."""
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many CPU threads of torch in here."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
