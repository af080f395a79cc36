"""Pruning scores of the new runs of a stack, by one pass over the data for all networks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from lit_dps.engines.eligible import reason_of
from lit_dps.engines.functional import Call, Functional
from lit_dps.engines.matrix_products import ConvolutionsAsProducts
from lit_dps.engines.memory import is_out_of_memory
from lit_dps.engines.network_run import NetworkRun
from lit_dps.engines.stackable_loss import trains_on_whole_batches
from lit_dps.engines.trial_settings import TrialSettings
from lit_dps.pruning import Network, pruner_of
from lit_dps.pruning.pruner import OneShot, Scores

# Examples in a batch of a pass for many networks on a GPU, unless the mask depends on it.
GPU_BATCH_SIZE = 128
# The lines of this process about errors.
_reported: set[str] = set()


def scores_of_new_runs(
    runs: Sequence[NetworkRun], settings: TrialSettings, device_types: Sequence[str] = ("cuda",)
) -> list[Scores | None]:
    """Return the pruning scores of each new run; None if the run makes a pass for itself.

    On a GPU one pass for all networks is expected to be faster; this is not measured. Training
    steps of 100 networks of Simple-CNN at 128 examples process 1.4 times the examples a second of
    one network at 1,024 (H100, 2026-11-26), and a smaller network alone does not fill the GPU. On a
    CPU it is not the default: per network it takes 1.3 to 1.7 times the seconds of single passes
    with Simple-CNN, and 0.3 to 0.5 times with one hidden unit (`python -m benchmarks stack_setup`,
    one thread of an AMD EPYC, 2026-11-28).

    Args:
        runs: New runs of one stack, before they start.
        settings: The settings of the study.
        device_types: Types of devices on which the networks are scored together.
    """
    scores: list[Scores | None] = [None] * len(runs)
    groups: dict[tuple, list[int]] = {}
    for index, run in enumerate(runs):
        if run.module.device.type in device_types and _can_share_pass(run, settings):
            groups.setdefault(_key_of_pass(run, settings), []).append(index)
    for indices in groups.values():
        # Cells of a point share their network.
        networks: dict[Any, NetworkRun] = {}
        for index in indices:
            networks.setdefault(_key_of_network(runs[index], index, settings), runs[index])
        if len(networks) < 2:
            continue
        results = dict(zip(networks, _scores_of(list(networks.values()), settings), strict=True))
        for index in indices:
            scores[index] = results[_key_of_network(runs[index], index, settings)]
    return scores


def _can_share_pass(run: NetworkRun, settings: TrialSettings) -> bool:
    """Return True if a run needs a scoring pass that it can share with other networks."""
    trial = run.attempt.study_trial
    if run.is_resumed or trial.cell.sparsity == 0 or settings.stored_scores(trial) is not None:
        return False
    config = settings.resolve(trial).pruning
    pruner = pruner_of(config.method, config.options)
    is_stackable = isinstance(pruner, OneShot) and pruner.stackable
    return is_stackable and not trains_on_whole_batches(run.module, run.keeps_untrained)


def _key_of_pass(run: NetworkRun, settings: TrialSettings) -> tuple:
    """Return what networks have in common that are scored by one pass."""
    trial = run.attempt.study_trial
    config = replace(settings.resolve(trial).pruning, sparsity=0.0, seed=0, init="original")
    return (repr(config),)


def _key_of_network(run: NetworkRun, index: int, settings: TrialSettings) -> Any:
    """Return what networks with equal scores have in common."""
    key = settings.scores_key(run.attempt.study_trial)
    return index if key is None else key


def _scores_of(runs: Sequence[NetworkRun], settings: TrialSettings) -> list[Scores | None]:
    """Return the scores of networks by one pass; by several ones if memory is insufficient.

    After another error, which is printed, each network makes a pass for itself.
    """
    try:
        return list(scores_of_stack(runs, settings))
    except Exception as error:  # a pruning method of the user may raise anything
        if not is_out_of_memory(error):
            # The passes of single networks show whether one of them causes the error.
            _report(error)
            return [None] * len(runs)
    if len(runs) < 4:
        return [None] * len(runs)
    half = len(runs) // 2
    return [*_scores_of(runs[:half], settings), *_scores_of(runs[half:], settings)]


def _report(error: Exception) -> None:
    """Print once why networks make a scoring pass each."""
    line = (
        "each network makes its own scoring pass, because a pass for all networks fails: "
        f"{reason_of(error)}"
    )
    if line not in _reported:
        _reported.add(line)
        print(line, file=sys.stderr, flush=True)


def scores_of_stack(runs: Sequence[NetworkRun], settings: TrialSettings) -> list[Scores]:
    """Return the scores of each network, by one pass for all of them.

    The method sees one network: its parameters have a first dimension for the runs, and its loss is
    the sum of the losses. The gradient of the sum is the gradient of each network.

    Args:
        runs: New runs of one stack, whose method is `stackable`.
        settings: The settings of the study.
    """
    first = runs[0]
    config = settings.resolve(first.attempt.study_trial).pruning
    pruner = pruner_of(config.method, config.options)
    assert isinstance(pruner, OneShot)
    batch_size = config.batch_size
    if first.module.device.type == "cuda" and pruner.batch_invariant:
        batch_size = GPU_BATCH_SIZE
    with first.copy_to_prune(config, batch_size) as network:
        stacked = _stacked_network(network, runs)
        scores = pruner.scores(stacked, torch.Generator())
    return [
        {name: score[row].clone() for name, score in scores.items()} for row in range(len(runs))
    ]


def _stacked_network(network: Network, runs: Sequence[NetworkRun]) -> Network:
    """Return the networks of runs as one network.

    Args:
        network: A copy of the first run's network, which computes the losses of all.
        runs: The runs.
    """
    tensors: dict[str, Tensor] = {}
    for name, _ in runs[0].module.named_parameters():
        rows = [run.module.get_parameter(name).detach() for run in runs]
        tensors[name] = torch.stack(rows)
    parameters = {name: nn.Parameter(tensors[name]) for name in network.parameters}
    functional = Functional(network.module)

    def sum_over_runs(call: str | Call, batch: Any) -> Tensor:
        convolutions = nullcontext()
        if runs[0].module.device.type == "cuda":
            convolutions = ConvolutionsAsProducts()
        with convolutions:
            values = vmap(
                lambda tensors: functional.call(call, tensors, batch), randomness="different"
            )({**tensors, **parameters})
        return values.sum()

    return _NetworksOfRuns(
        module=network.module,
        parameters=parameters,
        batch_size=network.batch_size,
        length=network.length,
        batches=network.batches,
        loss_of=lambda batch, index: sum_over_runs("loss", batch),
        one=network,
        sum_over_runs=sum_over_runs,
    )


@dataclass(frozen=True)
class _NetworksOfRuns(Network):
    """The networks of several runs as one, whose losses are sums over the runs.

    Attributes:
        one: The network whose module computes the values of all.
        sum_over_runs: Returns the sum of what a call of the module returns for each run.
    """

    one: Network
    sum_over_runs: Callable[[str | Call, Any], Tensor]

    def cross_entropy(self, batch: Any, temperature: float) -> Tensor:
        """Return the sum of the cross-entropies of all runs."""

        def of_one(module: nn.Module, batch: Any) -> Tensor:
            return replace(self.one, module=module).cross_entropy(batch, temperature)

        return self.sum_over_runs(of_one, batch)
