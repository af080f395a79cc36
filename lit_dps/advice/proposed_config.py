"""Proposes a goal, budgets and a search space from a short run, as a configuration to edit."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import yaml

from lit_dps.advice.code_inspection import UserCode
from lit_dps.advice.progress_run import ProgressRun
from lit_dps.core.config_yaml import ConfigLoader
from lit_dps.core.errors import ConfigError, UserError
from lit_dps.core.metric_names import is_rising
from lit_dps.core.text import format_duration

# The goal is at this share of the progress of the run, or where half of its steps were done,
# whichever is easier: other batch sizes should reach it too.
SHARE_OF_PROGRESS = 0.9
# Validations until the goal: so many values of K can be told apart.
CHECKS_TO_GOAL = 16
# Proposed steps over those to the goal at the user's batch size. A batch that is 8 times smaller
# takes at most 8 times as many steps.
MAX_STEPS_RATIO = 8
# The least improvement of the metric, as a share of its first value, that counts as progress.
MIN_PROGRESS = 0.01
RATE_FACTOR = 32.0
BATCH_SIZE_FACTORS = (0.25, 1, 4, 16)
TRIALS = 12
# Texts that every version of YAML reads as a text, unless they are a word such as null or on.
_PLAIN_TEXT = re.compile(r"[A-Za-z_][\w./-]*", re.ASCII)


class ProposedGoal(NamedTuple):
    """A goal and its budgets.

    Attributes:
        metric: The metric.
        value: Its value.
        at_least: Whether the metric rises.
        steps: Steps to the goal in the short run.
        check_interval: Steps between two validations.
        max_steps: The step budget of a trial.
    """

    metric: str
    value: float
    at_least: bool
    steps: int
    check_interval: int
    max_steps: int


def choose_metric(run: ProgressRun, choice: str | None) -> tuple[str, list[str]]:
    """Return the metric of the goal, and the other ones.

    A loss is preferred: it is finer than an error or an accuracy.

    Raises:
        ConfigError: for a choice that validation does not log.
    """
    names = list(run.initial)
    if choice is not None:
        if choice not in names:
            raise ConfigError("--metric", choice, f"a metric of validation: {', '.join(names)}")
        chosen = choice
    else:
        losses = [name for name in names if "loss" in name.lower()]
        chosen = (losses or names)[0]
    return chosen, [name for name in names if name != chosen]


def propose_goal(run: ProgressRun, metric: str) -> ProposedGoal:
    """Return a goal that the short run has met, with budgets for other batch sizes.

    Raises:
        UserError: if the metric did not improve.
    """
    at_least = is_rising(metric)
    sign = -1.0 if at_least else 1.0
    steps = []
    falling = []
    for step, value in zip(run.steps, run.curves.get(metric, ()), strict=True):
        if math.isfinite(value):
            steps.append(step)
            falling.append(sign * value)
    first = sign * run.initial[metric]
    best = min(falling, default=math.inf)
    if not math.isfinite(first):
        first = falling[0] if falling else math.inf
    if not first - best > MIN_PROGRESS * abs(first):
        raise UserError(
            f"{metric} did not improve within {run.total_steps} steps "
            f"({format_duration(run.step_seconds * run.total_steps, 2)}): it was "
            f"{sign * first:.4g}, and its best value is {sign * best:.4g}. Give more time "
            "by --seconds, or another --metric.",
            key="--seconds",
        )
    easy = first - SHARE_OF_PROGRESS * (first - best)
    half = min(
        (value for step, value in zip(steps, falling, strict=True) if 2 * step <= steps[-1]),
        default=best,
    )
    value = sign * _rounded_up(max(easy, half), first)
    reached = _first_step(steps, falling, sign * value)
    interval = _nice(max(1.0, reached / CHECKS_TO_GOAL))
    max_steps = math.ceil(MAX_STEPS_RATIO * reached / interval) * interval
    return ProposedGoal(metric, value, at_least, reached, interval, max_steps)


def _first_step(steps: Sequence[int], values: Sequence[float], goal: float) -> int:
    """Return the first step whose value is at most the goal."""
    for step, value in zip(steps, values, strict=True):
        if value <= goal:
            return step
    return steps[-1]


def _rounded_up(value: float, first: float) -> float:
    """Return a value with two digits of its distance from the first one, not smaller."""
    unit = 10.0 ** (math.floor(math.log10(abs(first - value) or 1.0)) - 1)
    digits = max(0, -round(math.log10(unit)))
    return round(math.ceil(value / unit - 1e-9) * unit, digits)


def _nice(number: float) -> int:
    """Return the largest of 1, 2, 4, 5, 8, 10, 20, 40, 50, ... up to a number."""
    power = 10 ** math.floor(math.log10(number))
    for factor in (8, 5, 4, 2, 1):
        if factor * power <= number:
            return factor * power
    return power


def batch_sizes_around(batch_size: int, largest: int | None) -> list[int]:
    """Return batch sizes around the user's, up to the largest one."""
    sizes = set()
    for factor in BATCH_SIZE_FACTORS:
        size = max(1, round(factor * batch_size))
        if largest is None or size <= largest:
            sizes.add(size)
    return sorted(sizes or {batch_size})


def config_text(
    file: str,
    module: str,
    code: UserCode,
    run: ProgressRun,
    goal: ProposedGoal,
    others: Sequence[str],
    largest: int | None,
) -> str:
    """Return the configuration with comments.

    Args:
        file: The name of the configuration file.
        module: The name of the user's module.
        code: The classes and keys.
        run: The short run.
        goal: The goal.
        others: Further metrics of validation.
        largest: The largest batch size; None if unknown.
    """
    limit = "at_least" if goal.at_least else "at_most"
    training = goal.max_steps * (run.step_seconds + run.check_seconds / goal.check_interval)
    sizes = batch_sizes_around(code.batch_size, largest)
    named = f" Others: {', '.join(map(_yaml_text, others))}." if others else ""
    default_key = code.batch_size_key == "data.batch_size"
    low, high = code.rate / RATE_FACTOR, code.rate * RATE_FACTOR
    name = file.removesuffix(".yaml").rpartition("/")[2]
    lines = [
        f"# Made by `lit-dps init {module}.py`; edit it.",
        "# Which batch size, on how many devices, how long:",
        f"#   lit-dps advise {file} --budget 10m",
        "# The whole curve of steps against batch size:",
        f"#   lit-dps study {file}",
        f"model: {{class_path: {module}.{code.module.__name__}}}",
        f"data: {{class_path: {module}.{code.data.__name__}}}",
        "trainer: {accelerator: auto}",
        "goal:",
        f"  # A run of {run.total_steps} steps at B = {code.batch_size} and {code.rate_key} = "
        f"{code.rate:g} met this at step {goal.steps}.{named}",
        f"  metric: {_yaml_text(goal.metric)}",
        f"  {limit}: {_yaml_number(goal.value)}",
        "  # Steps between two validations: K is known to this.",
        f"  check_interval: {goal.check_interval}",
        f"  # {MAX_STEPS_RATIO} times the steps of that run, for smaller batches and worse rates.",
        f"  # One trial of max_steps takes about {format_duration(training, 2)} here.",
        f"  max_steps: {goal.max_steps}",
        "study:",
        f"  name: {_yaml_text(name)}",
    ]
    if not default_key:
        lines.append(f"  batch_size_key: {code.batch_size_key}")
    lines += [
        f"  batch_sizes: [{', '.join(map(str, sizes))}]  # advise chooses its own",
        "  sparsities: [0.0]",
        f"  trials: {TRIALS}  # for each batch size",
        "  space:",
        f"    # {RATE_FACTOR:g} times below and above your {code.rate:g}.",
        f"    {code.rate_key}: {{low: {_yaml_number(low, 2)}, high: {_yaml_number(high, 2)}, "
        "scale: log}",
    ]
    return "\n".join(lines) + "\n"


def _yaml_text(text: str) -> str:
    """Return a text as YAML in one line, in quotes where YAML would read another value."""
    if _PLAIN_TEXT.fullmatch(text) and yaml.load(text, Loader=ConfigLoader) == text:
        return text
    quoted = yaml.safe_dump(text, default_style='"', allow_unicode=True, width=math.inf)
    return quoted.rstrip("\n")


def _yaml_number(number: float, digits: int = 6) -> str:
    """Return a number that YAML reads as a number: 3.1e-05, and 1.0e-05 for 1e-05."""
    mantissa, e, exponent = f"{number:.{digits}g}".partition("e")
    if e and "." not in mantissa:
        mantissa += ".0"
    return f"{mantissa}{e}{exponent}"
