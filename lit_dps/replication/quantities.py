"""The registry of quantities: what `claims.yaml` can name.

A quantity is a function `(study, **arguments)`, or `(study, other, **arguments)` for a pair. It
returns a `Measurement` per series: a number with its interval, and a sentence. It returns None for
studies that it does not apply to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lit_dps.replication import scaling, search, terms
from lit_dps.replication.rules import Measurements


class Quantity(NamedTuple):
    """A function that measures, and how many studies it takes."""

    measure: Callable[..., Measurements | None]
    studies: int = 1


QUANTITIES = {
    "exponent_at_small_batches": Quantity(scaling.exponent_at_small_batches),
    "examples_ratio": Quantity(scaling.examples_ratio),
    "steps_per_doubling": Quantity(scaling.steps_per_doubling),
    "sparse_steps_ratio": Quantity(scaling.sparse_steps_ratio),
    "sparse_critical_ratio": Quantity(scaling.sparse_critical_ratio),
    "critical_ratio_of_optimizers": Quantity(scaling.critical_ratio_of_optimizers, studies=2),
    "rate_trend": Quantity(search.rate_trend),
    "success_trend": Quantity(search.success_trend),
    "term_ratio": Quantity(terms.term_ratio),
    "c1_over_theory": Quantity(terms.c1_over_theory, studies=2),
}
