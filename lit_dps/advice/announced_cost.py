"""Prints what asking costs, before anything is run for it."""

from __future__ import annotations

import math
import sys

from lit_dps.advice.options import Clock, print_line
from lit_dps.advice.pilot_course import NOISE_READING_SHARE, max_trainings
from lit_dps.advice.pilot_plan import PilotPlan
from lit_dps.advice.pilot_preview import Preview
from lit_dps.advice.question import LIKELY_RUNS, Question
from lit_dps.advice.user_workload import user_batch_size
from lit_dps.analysis.tables import significant
from lit_dps.core.progress_line import stderr_columns
from lit_dps.core.text import format_duration, number_text


def print_cost(question: Question, clock: Clock) -> None:
    """Print what asking costs, by all timed steps."""
    print_line(question.step_time.describe())
    batch_size = user_batch_size(question.setup.workload)
    most_steps = question.most_steps
    if question.plan is not None:
        trainings = max_trainings(question, batch_size)
        noise = NOISE_READING_SHARE if question.reads_noise else 0.0
        training = (trainings + noise) * question.training_seconds
        clock.announce(clock.spent + training + question.other_seconds(1 + LIKELY_RUNS))
        total = f"With start and figures it is at most about {clock.announced_text}."
        if clock.announced > clock.budget:
            total = f"The budget ends it after {clock.announced_text}, start and figures included."
        if clock.was_announced:
            total = (
                f"An earlier command announced at most about {clock.announced_text} with start "
                f"and figures; {format_duration(clock.spent, 2)} are spent."
            )
        print_line(
            "advice takes your run, and for runs at larger batch sizes at most about "
            f"{trainings - 1:g} times as long. If your run takes all of its {most_steps} "
            f"steps, that is {format_duration(training, 2)} of training. {total}"
        )
        seconds = question.step_seconds_by_devices
        of_user = question.step_seconds_here(batch_size)
        preview = Preview.of(question.plan, question.batch_sizes, seconds, of_user)
        print_line(preview.head())
        # A table is not wrapped.
        print("\n".join(preview.table(stderr_columns())), file=sys.stderr, flush=True)
        for line in preview.likely_batch_sizes():
            print_line(line)
        return
    print_share(question.options.budget, batch_size, most_steps, question.training_seconds)


def print_end(clock: Clock) -> None:
    """Print what asking took, beside what was announced."""
    total = format_duration(clock.spent, 2)
    took = f"advice took {total}"
    if clock.spent_before:
        own = format_duration(clock.spent - clock.spent_before, 2)
        took = f"this command took {own}, and all commands of this advice {total}"
    if min(clock.announced, clock.budget) < math.inf:
        took += f"; it was announced to take at most {clock.announced_text}"
    print_line(took)


def print_pilot(plan: PilotPlan, most_steps: int, training: float, ranks: int) -> None:
    """Print what the command will do, before it does anything.

    Args:
        plan: The user's run.
        most_steps: Its steps, if it spends its budget.
        training: Their seconds on one device.
        ranks: The devices of the run.
    """
    devices = ""
    if ranks > 1:
        devices = f"; {ranks} devices are timed next"
    print_line(
        f"your run comes first: B = {plan.batch_size}, {plan.rate_key} = "
        f"{number_text(plan.rate)}. Its {most_steps} steps take at most about "
        f"{format_duration(training, 2)} on one device{devices}"
    )


def print_share(
    budget: float, batch_size: int, most_steps: int, training: float, about: str = ""
) -> None:
    """Print what a budget is as a share of one training."""
    share = budget / training
    cost = f"{share:.0%} of"
    if share >= 2:
        cost = f"{significant(share)} times"
    print_line(
        f"one training of {most_steps} steps at B = {batch_size} takes "
        f"{about}{format_duration(training, 2)} on one device; advice takes at most "
        f"{cost} that"
    )
