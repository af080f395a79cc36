"""Runs the quick conformance tests of `lit_dps.testing` on the plug-ins of other people.

A pruner, an update rule, a reading, a rule of the goal, a statistic or a batch schedule may break
what a study relies on, and the study would give wrong numbers without an error. The values of a
statistic are also tested where it is named (`lit_dps.core.statistic`). Modules, data and callbacks
are tested by the dry run.

The tests run once for each command, in the process that checks the study: workers and ranks build
equal plug-ins. They use small networks, and plug-ins that are built for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from lit_dps.core.batch_schedule import NAME_KEY
from lit_dps.core.errors import ConfigError, first_line
from lit_dps.core.goal import rule_of as goal_rule_of
from lit_dps.core.trial import Trial
from lit_dps.engines.trial_settings import TrialSettings
from lit_dps.module import ImageClassifier
from lit_dps.optim import OURS, RULES, Rule
from lit_dps.pruning import pruner_of
from lit_dps.readings.reading import KEY as READINGS_KEY
from lit_dps.study.preflight.varied_trials import smallest_trials, trials_with_each_choice
from lit_dps.study.setup import StudySetup
from lit_dps.testing import (
    ConformanceError,
    check_goal,
    check_pruner,
    check_reading,
    check_rule,
    check_schedule,
    check_statistic,
)
from lit_dps.training.deterministic import one_thread
from lit_dps.training.hidden_state import preserve_rng_state

OURSELVES = "lit_dps"
MAX_SPARSITY = 0.9
MAX_SCHEDULE_STEPS = 1000  # enough for a schedule that remembers, and fast


class PlugIn(NamedTuple):
    """A plug-in of a study, and its quick test.

    Attributes:
        key: The key of the configuration that names it.
        name: Its name in the configuration.
        test: The name of its test in `lit_dps.testing`.
        call: How an author calls the test on it.
        run: Runs the quick part of the test.
    """

    key: str
    name: str
    test: str
    call: str
    run: Callable[[], None]


def check_plug_ins(setup: StudySetup) -> list[str]:
    """Test the foreign plug-ins of a study, and return a note on each that cannot be tested.

    Random states do not change.

    Raises:
        ConfigError: for a plug-in that fails its test; it names the test and the call of it.
    """
    notes = []
    for plug_in in foreign_plug_ins(setup):
        note = check_plug_in(plug_in)
        if note is not None:
            notes.append(note)
    return notes


def foreign_plug_ins(setup: StudySetup) -> list[PlugIn]:
    """Return the plug-ins of a study that are not part of lit_dps, each once."""
    settings = setup.trial_settings()
    found = [*_goal_rules(setup), *_statistics(setup), *_readings(settings), *_schedules(setup)]
    for smallest in smallest_trials(setup):
        for trial in trials_with_each_choice(setup, smallest):
            found += _pruners(settings, trial)
            found += _update_rules(settings, trial)
    return list({plug_in.call: plug_in for plug_in in found}.values())


def is_foreign(kind: type) -> bool:
    """Return True if a class is not part of lit_dps."""
    return kind.__module__.partition(".")[0] != OURSELVES


def _goal_rules(setup: StudySetup) -> Iterator[PlugIn]:
    goal = setup.built_goal
    rule = goal_rule_of(goal.rule, goal.options)
    if is_foreign(type(rule)):
        call = _call_text(goal.rule, goal.options)
        run = partial(check_goal, rule, quick=True)
        yield PlugIn("goal.rule", goal.rule, "check_goal", call, run)


def _statistics(setup: StudySetup) -> Iterator[PlugIn]:
    statistic = setup.study.k_star_statistic
    if is_foreign(type(statistic)):
        name = setup.study.statistic
        run = partial(check_statistic, statistic)
        yield PlugIn("study.statistic", name, "check_statistic", f"{name}()", run)


def _readings(settings: TrialSettings) -> Iterator[PlugIn]:
    for spec in settings.readings:
        if is_foreign(spec.kind):
            call = _call_text(spec.class_path, spec.init_args)
            run = partial(check_reading, spec.build())
            yield PlugIn(READINGS_KEY, spec.class_path, "check_reading", call, run)


def _schedules(setup: StudySetup) -> Iterator[PlugIn]:
    steps = min(setup.goal.max_steps, MAX_SCHEDULE_STEPS)
    for axes in {cell.axes for cell in setup.study.cells}:
        config = setup.batch.with_axes(axes)
        schedule = config.build()
        if is_foreign(type(schedule)):
            call = _call_text(config.schedule, config.options or {})
            run = partial(check_schedule, schedule, max(setup.study.batch_sizes), steps)
            yield PlugIn(NAME_KEY, config.schedule, "check_schedule", call, run)


def _pruners(settings: TrialSettings, trial: Trial) -> Iterator[PlugIn]:
    config = settings.resolve(trial).pruning
    pruner = pruner_of(config.method, config.options)
    if config.sparsity and is_foreign(type(pruner)):
        # A larger sparsity may leave nothing of the small network of the test.
        sparsities = [min(config.sparsity, MAX_SPARSITY)]
        call = _call_text(config.method, config.options or {})
        run = partial(check_pruner, pruner, sparsities=sparsities, quick=True)
        yield PlugIn("pruning.method", config.method, "check_pruner", call, run)


def _update_rules(settings: TrialSettings, trial: Trial) -> Iterator[PlugIn]:
    module = settings.workload.module(trial)
    if not isinstance(module, ImageClassifier):
        return
    arguments = module.hparams
    name = str(arguments.get("optimizer"))
    rule = RULES.get(name)
    if rule is None or rule in OURS:
        return
    run = partial(_check_rule, rule, dict(arguments))
    yield PlugIn("model.optimizer", name, "check_rule", name, run)


def _check_rule(rule: Rule, arguments: Mapping[str, Any]) -> None:
    """Run `check_rule` with the hyperparameters of a module; fails if one is not a number."""
    numbers = {}
    for key in rule.hyperparameters:
        if key in arguments:
            numbers[key] = float(arguments[key])
    check_rule(rule, numbers, quick=True)


def _call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """Return how an object of a class is made: "my_goal.Settled(checks=2)"."""
    texts = [f"{key}={value!r}" for key, value in arguments.items()]
    return f"{name}({', '.join(texts)})"


def check_plug_in(plug_in: PlugIn) -> str | None:
    """Test a plug-in as `check_plug_ins` does. Return a note if it cannot be tested, else None."""
    try:
        with preserve_rng_state(), one_thread():
            plug_in.run()
    except ConformanceError as error:
        allowed = f"a plug-in that passes {plug_in.test} ({error.requirement}): {error}"
        hint = f"In a test call lit_dps.testing.{plug_in.test}({plug_in.call})"
        raise ConfigError(plug_in.key, plug_in.name, allowed, hint) from error
    except Exception as error:
        # The network of the test does not suit each plug-in. The dry run tries it in a trial.
        cause = f"{type(error).__name__}: {first_line(error)}"
        return (
            f"{plug_in.name} was not tested alone: it fails with the network of {plug_in.test} "
            f"({cause})"
        )
    return None
