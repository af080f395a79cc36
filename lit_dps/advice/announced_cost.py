"""Prints what asking costs, before anything is run for it."""

from __future__ import annotations

from lit_dps.advice.options import print_line
from lit_dps.advice.pilot_course import max_trainings, step_seconds_by_devices
from lit_dps.advice.pilot_plan import PilotPlan
from lit_dps.advice.pilot_preview import Preview
from lit_dps.advice.question import Question
from lit_dps.advice.user_workload import user_batch_size
from lit_dps.analysis.tables import significant
from lit_dps.core.text import format_duration, number_text


def print_cost(question: Question) -> None:
    """Print what asking costs as a share of one training, by all timed steps."""
    print_line(question.step_time.describe())
    batch_size = user_batch_size(question.setup.workload)
    max_steps = question.setup.goal_of_trials.max_steps
    if question.plan is not None:
        trainings = max_trainings(question, batch_size)
        longest = format_duration(trainings * question.training_seconds, 2)
        print_line(
            f"asking takes your run and at most {trainings - 1:g} times as long again for runs "
            f"at larger batch sizes: {longest} of training if your run takes all of its "
            f"{max_steps} steps"
        )
        sizes = question.batch_sizes
        preview = Preview.of(question.plan, sizes, step_seconds_by_devices(question))
        print_line("\n".join(preview.table()))
        return
    print_share(question.options.budget, batch_size, max_steps, question.training_seconds)


def print_pilot(plan: PilotPlan, max_steps: int, training: float) -> None:
    """Print what the command will do, before it does anything."""
    print_line(
        f"first your run: B = {plan.batch_size}, {plan.rate_key} = {number_text(plan.rate)}; "
        f"its {max_steps} steps at most take about {format_duration(training, 2)} on one device"
    )


def print_share(
    budget: float, batch_size: int, max_steps: int, training: float, about: str = ""
) -> None:
    """Print what a budget is as a share of one training."""
    share = budget / training
    cost = f"{share:.0%} of"
    if share >= 2:
        cost = f"{significant(share)} times"
    print_line(
        f"one training of {max_steps} steps at B = {batch_size} takes {about}"
        f"{format_duration(training, 2)} on one device: asking is at most {cost} that"
    )
