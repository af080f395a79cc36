"""Whether the limits of the law that were set by public runs are special to these: each workload is
left out in turn.

`python -m benchmarks.limits` prints the section of docs/advice-law.md. Two limits were chosen with
these runs in view: the factor that the interval of B_crit may span (`MAX_SPAN`), and the
tails of an observation's error (`law_fit.TAILS`). For every workload each is chosen again by all
the others, and judged on the one left out.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.advice import ALL, curves, must_refuse, parts, runs_of
from benchmarks.text import table
from lit_dps.analysis import law_fit, law_verdict
from lit_dps.analysis.law import Law, fit_law
from lit_dps.analysis.law_fit import fit_scaling
from lit_dps.analysis.observations import Observation, exact

WIDE, TAILS = (10.0, 30.0, 100.0, 300.0, 1000.0), (3.0, 8.0, 30.0)
FALSE = 10.0  # needless refusals that one false confidence weighs as much as
MISSED = 2 / (
    1 - 0.8
)  # what a value outside of the 80 % interval costs, for its distance (Winkler's score)


@contextmanager
def limit(module, name: str, value: float) -> Iterator[None]:
    """In here a limit has another value."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def must_refuse_part(known: list[Observation], seen: list[Observation]) -> bool:
    """Whether nothing may be said beyond a part of a workload: by all of it, or as it ends below
    half of B_crit."""
    if must_refuse(known):
        return True
    points = exact(known)
    fit = fit_scaling([p.batch_size for p in points], [p.steps for p in points])
    return (
        max(p.batch_size for p in exact(seen))
        < law_verdict.MIN_SHARE_OF_CRITICAL * fit.critical_batch_size
    )


def laws(runs: pd.DataFrame) -> Iterator[dict]:
    """A row a workload and part: curve, must, refused (for another reason than `MAX_SPAN`), span of
    B_crit, score.

    The score is that of the 80 % interval of log K at the batch sizes above the part; nan without
    any.
    """
    with limit(law_verdict, "MAX_SPAN", math.inf):
        for curve, known in curves(runs):
            some = [(lower, held) for seen, lower, held in parts(known) if seen != "all others"]
            for lower, held in [(known, []), *some]:
                law = fit_law(lower)
                span = math.inf
                if law.critical is not None:
                    span = law.critical.high / law.critical.low
                row = {
                    "curve": curve,
                    "must": must_refuse_part(known, lower),
                    "refused": not law.is_b_crit_known,
                }
                yield {**row, "span": span, "score": _score(law, held)}


def _score(law: Law, held: Sequence[Observation]) -> float:
    if not held or math.isnan(law.reach[0]):
        return math.nan
    low, high = law.reach
    held = [p for p in held if low <= p.batch_size <= high]
    if not held:
        return math.nan
    low, high = np.log(np.percentile(law.samples([p.batch_size for p in held]), ALL, axis=0))
    truth = np.log([p.steps for p in held])
    outside = np.maximum(low - truth, 0) + np.maximum(truth - high, 0)
    return float((high - low + MISSED * outside).mean())


def left_out(losses: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """The value that all other workloads choose for each, and the losses of these choices.

    Args:
        losses: Summed over the others it is least where a value is best: columns the values, rows
            the workloads.
    """
    others = losses.sum() - losses
    chosen: Any = others.idxmin(axis=1)
    return chosen, pd.Series({curve: losses.loc[curve, value] for curve, value in chosen.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--traces", type=Path, default=os.environ.get("LIT_DPS_TRACES"), help="folder of other runs"
    )
    folder = parser.parse_args().traces
    runs = runs_of(None if folder is None else Path(folder))
    found = {}
    for tails in TAILS:
        with limit(law_fit, "TAILS", tails):
            found[tails] = pd.DataFrame(laws(runs))
    here = found[law_fit.TAILS]
    print(
        _verdicts(
            "span", {wide: here.assign(no=here["refused"] | (here["span"] > wide)) for wide in WIDE}
        ),
        "\n",
    )
    by = {
        tails: rows.assign(no=rows["refused"] | (rows["span"] > law_verdict.MAX_SPAN))
        for tails, rows in found.items()
    }
    print(_verdicts("tails", by))
    scores = pd.DataFrame(
        {t: rows.groupby("curve")["score"].mean() for t, rows in found.items()}
    ).dropna()
    chosen, lost = left_out(scores)
    print(
        f"\ntails by the score of the 80 % interval: {dict(scores.mean().round(3))}, left out "
        f"{lost.mean():.3f}; "
        f"the others choose {chosen.value_counts().to_dict()}"
    )


def _verdicts(name: str, by: dict[float, pd.DataFrame]) -> str:
    """False confidence and needless refusals at each value of a limit, then with each workload left
    out."""
    rows, losses = [], {}
    for value, verdicts in by.items():
        false, shy = verdicts["must"] & ~verdicts["no"], ~verdicts["must"] & verdicts["no"]
        which = (
            ", ".join(dict.fromkeys([*verdicts["curve"][false], *verdicts["curve"][shy]])) or "-"
        )
        must = verdicts["must"].sum()
        rows.append(
            [
                f"{value:g}",
                f"{false.sum()} of {must}",
                f"{shy.sum()} of {len(verdicts) - must}",
                which,
            ]
        )
        losses[value] = (FALSE * false + shy).groupby(verdicts["curve"]).sum()
    losses = pd.DataFrame(losses)
    chosen, lost = left_out(losses)
    text = table([name, "false confidence", "needless refusals", "where"], rows)
    often = chosen.value_counts().to_dict()
    return (
        f"{text}\n\nleft out: {lost.sum():g}, in sight {losses.sum().min():g}; the others "
        "choose "
        f"{often}"
    )


if __name__ == "__main__":
    main()
