"""Finds idle keys: keys of the grid and of the search that change nothing in a trial.

If a module ignores an argument, the curves are equal at every value of its axis. The dry run trains
a few steps at two values of each key, everything else equal. It compares all results exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dps.core.idle_axes import keys_that_vary, notes_on_idle_axes
from lit_dps.core.search_space import RATE_NAMES, Choices
from lit_dps.core.trial import Trial, Value, text_of
from lit_dps.engines.trial_settings import TrialSettings
from lit_dps.optim import RULES
from lit_dps.report.notes import Level
from lit_dps.study.data_hashes import fingerprint
from lit_dps.study.preflight.keys import rules_of
from lit_dps.study.preflight.short_trial import goal_of, perturb, run_short
from lit_dps.study.preflight.varied_trials import (
    smallest_trials,
    trials_with_each_choice,
    with_cell,
)
from lit_dps.study.probe_run import EndProbe, probe_fit
from lit_dps.study.setup import StudySetup
from lit_dps.training.rate_curve import rate_curve

STEPS = 3  # of a trial without validation
MAX_CONTEXTS = 8  # combinations of the other keys' values with which a key is tested
SAMPLES = 3  # samples of the search among these combinations


def idle_keys(settings: TrialSettings, setup: StudySetup) -> dict[str, Level]:
    """Return a note for each key that changes nothing in the first steps of a trial, and its level.

    A key is not idle if it changes a result at one combination of the other keys' values. For
    example, momentum may belong to one of several optimizers. There is no note for a key whose
    trials fail or are not reproducible.

    Args:
        settings: The settings of the study.
        setup: The study.
    """
    study = setup.study
    idle = notes_on_idle_axes(setup.config(), study.axes, study.space)
    notes = dict.fromkeys(idle, Level.WEAK)
    tested: list[str] = []
    for key in keys_that_vary(study.axes, study.space):
        if key.startswith("pruning.") and not max(study.sparsities):
            # It holds for this grid only, and the study may be extended.
            notes[f"{key} changes nothing: study.sparsities is 0 alone"] = Level.INFO
        elif not _is_known_to_act(setup, key):
            tested.append(key)
    if not tested:
        return notes
    runs = _RecordedRuns(settings)
    trials = _contexts(setup)
    for key in tested:
        # First without validation and the end of an epoch, which take longer than a few steps.
        if not _is_idle(runs, setup, trials, key, validates=False):
            continue
        if _is_idle(runs, setup, trials, key, validates=True):
            values = " and ".join(map(text_of, _ends(setup, key)))
            text = (
                f"{key} changes nothing: batches, losses, weights and metrics of {runs.steps} "
                f"steps are equal at {values}; unless it acts later in a trial, leave it out"
            )
            # Each study answers with a rate; another key may act later, such as a patience.
            is_rate = key.rpartition(".")[2] in RATE_NAMES
            notes[text] = Level.UNUSABLE if is_rate else Level.WEAK
    return notes


def _is_idle(
    runs: _RecordedRuns, setup: StudySetup, trials: Sequence[Trial], key: str, validates: bool
) -> bool:
    """Return True if trials that differ in a key alone have equal results; False if they fail.

    Args:
        runs: The recorded runs.
        setup: The study.
        trials: Combinations of the other keys' values.
        key: The key.
        validates: As of `_RecordedRuns.results`.
    """
    has_equal = False
    for trial in trials:
        trial = with_cell(trial, sparsity=0.0)
        results = runs.results(trial, validates)
        if results is None:
            continue
        for value in _far_values(setup, trial, key):
            if runs.results(_with_value(trial, key, value), validates) != results:
                return False
            has_equal = True
    return has_equal


def _is_known_to_act(setup: StudySetup, key: str) -> bool:
    """Return True for a key of lit_dps, and for a hyperparameter of the rule of our module."""
    section, _, name = key.partition(".")
    if section not in ("model", "data"):
        return True
    model = setup.workload.model
    if section == "data" or not model["class_path"].startswith("lit_dps."):
        return False
    return any(name in RULES[rule].hyperparameters for rule in rules_of(setup) if rule in RULES)


def _contexts(setup: StudySetup) -> list[Trial]:
    """Return trials with all combinations of axes, all choices and some samples of the search.

    At most `MAX_CONTEXTS` trials are returned.
    """
    trials = smallest_trials(setup)
    first = trials[0]
    trials += trials_with_each_choice(setup, first)
    for number in range(1, SAMPLES):
        trials.append(replace(first, params=setup.sample(number)))
    contexts: list[Trial] = []
    for trial in trials:
        if trial not in contexts:
            contexts.append(trial)
    return contexts[:MAX_CONTEXTS]


def _ends(setup: StudySetup, key: str) -> tuple[Value, Value]:
    """Return the first and the last value of a key."""
    if key in setup.study.axes:
        axis = setup.study.axes[key]
        return axis[0], axis[-1]
    extremes = setup.study.space[key].extremes
    return extremes[0], extremes[-1]


def _far_values(setup: StudySetup, trial: Trial, key: str) -> list[Value]:
    """Return the ends of a key that differ from its value in a trial, the farther end first."""
    current = {**dict(trial.cell.axes), **trial.params}[key]
    first, last = _ends(setup, key)
    ends = [last, first]
    if key not in setup.study.axes:
        box = setup.study.space[key]
        if not isinstance(box, Choices) and box.unit(current) > 0.5:
            ends = [first, last]
    return [value for value in ends if value != current]


def _with_value(trial: Trial, key: str, value: Value) -> Trial:
    """Return a trial with another value of a key."""
    if key in trial.params:
        params: dict[str, Any] = {**trial.params, key: value}
        return replace(trial, params=params)
    axes = {**dict(trial.cell.axes), key: value}
    return with_cell(trial, axes=tuple(axes.items()))


class _RecordedRuns:
    """Runs each trial once for a few steps, and keeps its results.

    Attributes:
        steps: Optimizer steps of the longest trial.
    """

    def __init__(self, settings: TrialSettings):
        self.settings = settings
        self.steps = 0
        self._hashes: dict[str, list[str] | None] = {}

    def results(self, trial: Trial, validates: bool) -> list[str] | None:
        """Return the hashes of a trial's results; None if the trial failed.

        Args:
            trial: The trial.
            validates: Whether it is trained as in the dry run, with the end of an epoch and
                validation; otherwise for its first steps only.
        """
        name = f"{validates} {trial.cell!r} {sorted(trial.params.items())}"
        if name not in self._hashes:
            self._hashes[name] = None
            with suppress(Exception):  # a user's class may fail at this value
                self._hashes[name] = self._train(trial, validates)
        return self._hashes[name]

    def _train(self, trial: Trial, validates: bool) -> list[str]:
        if not validates:
            recorder = _Recorder(STEPS * self.settings.workload.parts_of(trial.cell))
            probe_fit(self.settings, trial, recorder)
            return recorder.results
        recorder = _Recorder()
        short = run_short(self.settings, trial, [recorder])
        self.steps = max(self.steps, short.goal.steps)
        return recorder.results


class _Recorder(Callback):
    """Records hashes of all results of the steps of a trial.

    Args:
        batches: The number of batches after which the fit ends; None for no limit.

    Attributes:
        results: Hashes of weights, batches, losses, schedules and validation, in order.
    """

    def __init__(self, batches: int | None = None):
        self.results: list[str] = []
        self._remaining_batches = batches

    def _add(self, *values: Any) -> None:
        self.results += map(fingerprint, values)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        goal = goal_of(trainer)
        rates = rate_curve(trainer, pl_module, trainer.max_steps, goal.steps_of_epoch)
        self._add(pl_module.state_dict(), rates)
        self._add([config.scheduler.state_dict() for config in trainer.lr_scheduler_configs])
        self._add([type(optimizer).__qualname__ for optimizer in trainer.optimizers])

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self._add(batch)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self._add(outputs)
        if self._remaining_batches is None:
            return
        self._remaining_batches -= 1
        if not self._remaining_batches:
            self._add(pl_module.state_dict())
            raise EndProbe

    def on_validation_batch_end(
        self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0
    ) -> None:
        self._add(batch, outputs)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._add(dict(trainer.callback_metrics))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._add(pl_module.state_dict())
        if self._remaining_batches is None:
            perturb(pl_module)
            with suppress(Exception):  # the dry run itself reports validation that fails
                goal_of(trainer).validate_now(trainer)
