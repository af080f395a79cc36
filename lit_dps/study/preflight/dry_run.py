"""The dry run of a study: short trials at both ends of its grid, before anything is created."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.nn.parameter import is_lazy

from lit_dps.core.errors import ConfigError
from lit_dps.core.trial import SCHEDULE, WARM_UP, Trial
from lit_dps.engines.eligible import standard_data
from lit_dps.engines.trial_settings import TrialSettings
from lit_dps.parallel.example_count import DIVISIBLE
from lit_dps.pruning import FromFile, Shuffle
from lit_dps.pruning.from_file import WEIGHTS_KEY
from lit_dps.readings.reading import KEY as READINGS_KEY
from lit_dps.report.notes import Level
from lit_dps.study.data_hashes import check_validation_data, fingerprint
from lit_dps.study.preflight.batch_size_check import compare_metrics, repeated_metrics
from lit_dps.study.preflight.idle_keys import idle_keys
from lit_dps.study.preflight.keys import columns_of_tables
from lit_dps.study.preflight.parts_check import check_parts
from lit_dps.study.preflight.resume_check import check_resume
from lit_dps.study.preflight.short_trial import ShortTrial, run_short
from lit_dps.study.preflight.varied_trials import smallest_trials, trials_with_each_value, with_cell
from lit_dps.study.probe_run import read_first_batch
from lit_dps.study.setup import StudySetup
from lit_dps.training.deterministic import deterministic_kernels
from lit_dps.training.rate_curve import rate_curve, schedule_shape
from lit_dps.training.validation import sum_text


def dry_run(setup: StudySetup) -> tuple[LightningDataModule, dict[str, Level]]:
    """Run short trials of a study, and return its data module and notes for the user.

    Short trials of each axis value run at the smallest batch size and, unless the data are ours, at
    the largest one, at the largest sparsity. The dry run does not change global generators, the
    storage or the user's folder.

    Returns:
        The data module of the smallest batch size, set up for training, and notes of one line, each
        with its level. `Level.INFO` are notes that weaken no number of the study.

    Raises:
        UserError: if a trial would fail, if a metric depends on the batch size of the grid, or if a
            trial resumes from a checkpoint with other values.
    """
    with setup.workload.without_side_effects() as workload:
        return _dry_run(setup, replace(setup.trial_settings(), workload=workload))


def _dry_run(
    setup: StudySetup, settings: TrialSettings
) -> tuple[LightningDataModule, dict[str, Level]]:
    notes: dict[str, Level] = {}
    of_model = trials_with_each_value(setup, ["model"])
    _refuse_shared_weights(settings, of_model)
    trials = smallest_trials(setup)
    for trial in trials:
        short = _run_smallest(settings, trial)
        notes |= short.notes
        notes |= dict.fromkeys(repeated_metrics(short, setup), Level.WEAK)
        _refuse_goal_met_untrained(trial, short)
        _check_short_trial(setup, short)
        notes |= _compare_with_largest(setup, settings, trial, short)
    # K with parts of a batch, and K of points with different data, are other quantities.
    notes |= dict.fromkeys(check_parts(settings, trials[0], setup), Level.WRONG)
    notes |= dict.fromkeys(_schedule_notes(setup, settings, trials[0]), Level.WEAK)
    for trial in trials_with_each_value(setup, ["data"]):
        notes |= dict.fromkeys(check_validation_data(setup, trial), Level.WRONG)
    equal = _trials_with_equal_weights(settings, of_model)
    for trial in equal:
        # Loaded weights may meet the goal before they are pruned.
        least_pruned = with_cell(trial, sparsity=min(setup.study.sparsities))
        if least_pruned.cell.sparsity < trial.cell.sparsity:
            _refuse_goal_met_untrained(least_pruned, run_short(settings, least_pruned))
    equal_weights = _equal_weights_note(settings, equal, of_model)
    equal_weights += _loaded_weights_note(settings, trials_with_each_value(setup, ["pruning"]))
    notes |= dict.fromkeys(equal_weights, Level.WEAK)
    with deterministic_kernels() if setup.on_gpu else nullcontext():
        for trial in trials_with_each_value(setup):
            # An interruption costs time, but changes no result.
            notes |= dict.fromkeys(check_resume(settings, trial, setup), Level.INFO)
        # The best value of such a key is the value of a random trial.
        notes |= idle_keys(settings, setup)
    return short.data, notes


def _compare_with_largest(
    setup: StudySetup, settings: TrialSettings, trial: Trial, short: ShortTrial
) -> dict[str, Level]:
    """Compare the short trial of a series with one at the largest batch size, and return notes.

    Raises:
        ConfigError: if batches, validation examples or the goal's metric do not fit the grid.
    """
    largest = max(setup.study.batch_sizes)
    # The batches and the validation of `ImageData` need no check.
    if standard_data(short.data) or largest == trial.cell.batch_size:
        return {}
    last = run_short(settings, with_cell(trial, batch_size=largest))
    notes = dict(last.notes)
    _check_same_validation(short, last)
    _check_batches_grow(settings, short, last)
    if _may_depend_on_batch_size(settings, short, last):
        dense = with_cell(trial, sparsity=0.0)
        notes |= dict.fromkeys(compare_metrics(settings, dense, short, setup), Level.WEAK)
    return notes


def _run_smallest(settings: TrialSettings, trial: Trial) -> ShortTrial:
    """Run a short trial. If its pruning pass fails, find out whether the dense trial fails too."""
    try:
        return run_short(settings, trial)
    except ConfigError as error:
        refusal = error
    # This is outside of the except block, so that the refusal is not shown as the context of an
    # error of the dense trial.
    if refusal.key == "pruning.method":
        run_short(settings, with_cell(trial, sparsity=0.0))
    raise refusal


def _check_short_trial(setup: StudySetup, short: ShortTrial) -> None:
    """Raise ConfigError if a study cannot use the readings or the data of a short trial."""
    taken = sorted({*short.attempt.read_columns} & columns_of_tables(setup))
    if taken:
        raise ConfigError(READINGS_KEY, taken[0], "names that are no columns of a study's tables")
    if setup.ranks > 1 and short.fit.examples.can_be_cut is False:
        raise ConfigError("trainer.strategy", "ddp", f"omitted. ddp needs {DIVISIBLE}")
    # Each value of an axis may have another data module.
    check_batch_size = getattr(short.data, "check_batch_size", None)
    if check_batch_size is not None:
        check_batch_size(
            max(cell.batch_size // setup.workload.parts_of(cell) for cell in setup.study.cells)
        )


def _check_same_validation(short: ShortTrial, last: ShortTrial) -> None:
    """Raise ConfigError if the largest batch size has other validation examples."""
    if last.goal.validated.first == short.goal.validated.first:
        return
    counts = []
    for each in (short, last):
        examples = sum_text(each.goal.validated.first or {})
        counts.append(f"{examples} at B = {each.fit.examples.batch_size}")
    raise ConfigError(
        "data",
        type(short.data).__name__,
        f"the same validation examples at every batch size, not {' and '.join(counts)}",
    )


def _may_depend_on_batch_size(settings: TrialSettings, short: ShortTrial, last: ShortTrial) -> bool:
    """Return whether the validation, or the module, knows the batch size of the grid."""
    is_of_data = settings.workload.batch_size_key.startswith("data.")
    return last.goal.validated.batches != short.goal.validated.batches or not is_of_data


def _refuse_shared_weights(settings: TrialSettings, trials: Sequence[Trial]) -> None:
    """Raise ConfigError if two trials have weights in the same memory.

    For example, a factory closes over a network. The dry run would add noise to its weights, and
    each trial would begin with the weights that the trial before it has trained.
    """
    for trial in trials:
        # Both modules are needed at once, because a deleted one leaves its memory to the next.
        modules = [settings.workload.module(trial) for _ in range(2)]
        one, other = map(_weights_by_address, modules)
        shared = [other[address] for address in other if address in one]
        if shared:
            names = ", ".join(shared[:3])
            raise ConfigError(
                "model",
                type(modules[0]).__name__,
                "a module whose weights are new in each trial, but all trials would share the "
                f"memory of {names}{', ...' * (len(shared) > 3)}",
                "Copy what the module takes where it is made: Net(copy.deepcopy(backbone)), or "
                "nn.Embedding.from_pretrained(VECTORS.clone()).",
            )
        # The next pair of modules needs their memory.
        del modules


def _weights_by_address(module: LightningModule) -> dict[int, str]:
    """Return the names of parameters by the address of their memory, without empty ones."""
    names = {}
    for name, parameter in module.named_parameters():
        if not is_lazy(parameter):
            # Sparse parameters, for example, have no memory of their own.
            with suppress(RuntimeError):
                names[parameter.untyped_storage().data_ptr()] = name
    names.pop(0, None)
    return names


def _hash_of_weights(trainer: Trainer, module: LightningModule, batch: Any) -> str:
    """Return a hash of the weights of a module; "" without weights."""
    weights = dict(module.named_parameters())
    if not weights:
        return ""
    return fingerprint(weights)


def _trials_with_equal_weights(settings: TrialSettings, trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials whose module has equal weights at two points of the search."""
    equal = []
    for trial in trials:
        hashes = []
        for point in range(2):
            start = replace(with_cell(trial, sparsity=0.0), point=point)
            with suppress(Exception):  # lazy weights have no values yet
                hashes.append(read_first_batch(settings, start, _hash_of_weights))
        if len(hashes) == 2 and hashes[0] and hashes[0] == hashes[1]:
            equal.append(trial)
    return equal


def _equal_weights_note(
    settings: TrialSettings, equal: Sequence[Trial], trials: Sequence[Trial]
) -> list[str]:
    """Return a note if samples begin with equal weights, with the values of these trials."""
    if not equal:
        return []
    where = ""
    if len(equal) < len(trials):
        where = f" at {'; '.join(_varied_values(trial, trials) for trial in equal)}"
    class_path = settings.workload.specs(equal[0])["model"]["class_path"]
    module = str(class_path).rpartition(".")[2]
    return [
        f"all samples begin with equal weights{where}: {module} loads them, or sets "
        "a seed. K* and study.repeats then do not include the variation between initial weights"
    ]


def _loaded_weights_note(settings: TrialSettings, trials: Sequence[Trial]) -> list[str]:
    """Return a note if pruned networks begin with the weights of a file."""
    for trial in trials:
        pruner = settings.pruning_callback(trial).pruner
        file = pruner.of if isinstance(pruner, Shuffle) else pruner
        if trial.cell.sparsity and isinstance(file, FromFile) and file.weights:
            return [
                "all samples begin with the weights of the file of masks "
                f"({WEIGHTS_KEY}) in pruned cells. K* and study.repeats then do not include the "
                "variation between initial weights"
            ]
    return []


def _varied_values(trial: Trial, trials: Sequence[Trial]) -> str:
    """Return the values of a trial that differ among trials, such as "model.width = 16"."""
    parts = []
    for key, value in _values_of(trial).items():
        if any(_values_of(other)[key] != value for other in trials):
            parts.append(f"{key} = {value}")
    return ", ".join(parts)


def _values_of(trial: Trial) -> dict[str, Any]:
    return {**dict(trial.cell.axes), **trial.params}


def _check_batches_grow(settings: TrialSettings, short: ShortTrial, last: ShortTrial) -> None:
    """Raise ConfigError if batches do not grow with the batch size key.

    This check is for batches whose number of examples is unknown.
    """
    smallest, largest = short.fit.examples, last.fit.examples
    if not smallest.volume or not largest.volume:
        return
    growth = largest.batch_size / smallest.batch_size
    if largest.volume >= math.sqrt(growth) * smallest.volume:
        return
    raise ConfigError(
        "study.batch_size_key",
        settings.workload.batch_size_key,
        "the key that the train dataloader takes its batch size from: "
        f"at {smallest.batch_size} a batch has {smallest.volume} numbers, and at "
        f"{largest.batch_size} {largest.volume}",
    )


def _refuse_goal_met_untrained(trial: Trial, short: ShortTrial) -> None:
    """Raise ConfigError if the network of a trial meets the goal before its first step."""
    goal, monitor = short.goal.goal, short.goal.monitor
    untrained = short.epochs.untrained
    if untrained is None or not goal.is_reached(untrained[monitor]):
        return
    key = "goal.at_most"
    side = "below"
    if goal.at_least:
        key = "goal.at_least"
        side = "above"
    elif str(goal).startswith("goal error"):
        key = "goal.error"
    allowed = (
        f"{side} {untrained[monitor]:.4g}, the {monitor} of the untrained network ({trial.cell})"
    )
    if not goal.at_least:
        allowed += f". If {monitor} is better when it is larger, set goal.at_least"
    raise ConfigError(key, goal.value, allowed)


def _shape_of_rates(trainer: Trainer, module: LightningModule, batch: object) -> dict[str, float]:
    """Return the steps of warm-up and schedule of a run before its first step."""
    # A schedule by epochs has no rates here, since the length of an epoch is not given.
    rates = rate_curve(trainer, module, trainer.max_steps, None)
    return schedule_shape(rates, trainer.max_steps)


def _schedule_notes(setup: StudySetup, settings: TrialSettings, trial: Trial) -> list[str]:
    """Return a note if warm-up or schedule take the same steps at all batch sizes.

    Such a part takes more examples at larger batch sizes. A part whose length is searched has no
    note. Nor has a schedule over all of `goal.max_steps`, because it ends where a trial ends.

    Args:
        setup: The study.
        settings: Its settings, without side effects.
        trial: A trial at the smallest batch size, with the first sample of the search.
    """
    smallest, largest = trial.cell.batch_size, max(setup.study.batch_sizes)
    if smallest == largest:
        return []
    lengths = _schedule_lengths(settings, trial, setup.built_goal.max_steps)
    if not lengths:
        return []
    for other in (with_cell(trial, batch_size=largest), replace(trial, params=setup.sample(1))):
        others = _schedule_lengths(settings, other, setup.built_goal.max_steps)
        lengths = {name: steps for name, steps in lengths.items() if others.get(name) == steps}
    parts = []
    for name, steps in lengths.items():
        parts.append(
            f"the {name} of the learning rate takes {steps:,.0f} steps at every batch size, which "
            f"are {steps * smallest:,.0f} examples at B = {smallest} and "
            f"{steps * largest:,.0f} at B = {largest}"
        )
    if not parts:
        return []
    return [f"{'; '.join(parts)}. Search its length, or give it in examples, to compare them"]


def _schedule_lengths(settings: TrialSettings, trial: Trial, max_steps: int) -> dict[str, float]:
    """Return the steps of the warm-up and of the schedule of a trial, if they end before it."""
    shape: dict[str, float] = {}
    with suppress(Exception):  # the short trials report errors of the user's code
        dense = with_cell(trial, sparsity=0.0)
        shape = read_first_batch(settings, dense, _shape_of_rates) or {}
    warm_up = shape.get(WARM_UP, 0)
    # The last step of a schedule already has the final rate.
    schedule = shape.get(SCHEDULE, 1) - 1
    lengths = {}
    if 1 < warm_up < max_steps - 1:
        lengths["warm-up"] = warm_up
    # A schedule that ends with the warm-up has no decay.
    if max(warm_up, 1) < schedule < max_steps - 1:
        lengths["schedule"] = schedule
    return lengths
