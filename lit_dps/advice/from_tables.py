"""Advice from two tables: runs to a goal and timed steps, of any origin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from lit_dps.advice.answer import Answer, answer
from lit_dps.advice.step_time import Link, Timed, fit_step_time
from lit_dps.analysis.law import law_of
from lit_dps.analysis.observations import medians
from lit_dps.analysis.tables import listed_numbers

RUNS = "batch_size", "steps"
TIMES = "local_batch", "seconds"


def advise(
    runs: pd.DataFrame,
    times: pd.DataFrame,
    batch_sizes: Sequence[int] | None = None,
    devices: Sequence[int] = (1,),
    link: Link | None = None,
    largest: int | None = None,
    node: int | None = None,
    **options: Any,
) -> Answer:
    """The answer of some runs to a goal and some timed steps.

    Args:
        runs: A row a run, each once. Columns batch_size [examples] and steps to the goal; censored,
            if there, is 1 for a run that did not meet the goal, whose steps are a lower bound;
            check, if there, is the spacing of checks [steps]; seed, if there, tells the runs of a
            batch size apart. Others are not looked at.
        times: A row a step that was timed. Columns local_batch [examples a device takes at once]
            and seconds; devices, nodes and accumulation, if there, else 1.
        batch_sizes: To answer for, in examples; by default those of the runs.
        devices: Numbers of devices to answer for.
        link, largest, node: As of `fit_step_time`.
        options: Others of `answer`, such as price.

    Raises:
        ValueError: for a missing column, for a run that is there twice, which would make intervals
            too narrow, and for numbers that are not positive and finite.
    """
    for name, table, needed in (("runs", runs, RUNS), ("times", times, TIMES)):
        if missing := [column for column in needed if column not in table]:
            raise ValueError(
                f"{name} lacks the columns {', '.join(missing)}; it has "
                f"{', '.join(map(str, table))}"
            )
    if "seed" in runs and (twice := runs.duplicated(["batch_size", "seed"])).any():
        where = listed_numbers(sorted({*runs.loc[twice, "batch_size"]}))
        raise ValueError(
            f"runs of one seed are there twice at batch size {where}: give each run once"
        )
    known = [column for column in Timed._fields if column in times]
    timed = [Timed(**row) for row in times[known].to_dict("records")]
    sizes = sorted({*runs["batch_size"]} if batch_sizes is None else {*batch_sizes})
    return answer(
        law_of(medians(runs)), fit_step_time(timed, link, largest, node), sizes, devices, **options
    )
