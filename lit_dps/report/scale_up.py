"""Steps at a larger size of data or model as text, for `lit-dps analyze --scale`."""

from __future__ import annotations

import math
from typing import NamedTuple

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.intervals import Interval, estimate
from lit_dps.analysis.scale_up import MAX_SCALE, fit_scale_up, runs_of_axis
from lit_dps.core.errors import ConfigError
from lit_dps.core.text import number_text


class Scale(NamedTuple):
    """A size to predict for.

    Attributes:
        axis: The configuration key of the size.
        value: The size, or its quotient by the largest measured one.
        is_factor: Whether `value` is a quotient.
    """

    axis: str
    value: float
    is_factor: bool


def scale_of(option: str) -> Scale:
    """Return the size of an option such as "data.train_examples=10x" or "model.width=512".

    Raises:
        ConfigError: for another text.
    """
    axis, _, text = option.partition("=")
    number = text.strip().removesuffix("x")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not axis.strip() or not 0 < value < math.inf:
        allowed = "an axis of the study and a size: data.train_examples=10x, or model.width=512"
        raise ConfigError("--scale", option, allowed)
    return Scale(axis.strip(), value, text.strip().endswith("x"))


def scale_up_text(study: Analysis, option: str) -> str:
    """Return K at a larger size, by batch size, as lines of text.

    Args:
        study: A study whose grid has an axis of sizes.
        option: As in `scale_of`.

    Raises:
        ConfigError: as `scale_of`, `runs_of_axis`, `fit_scale_up` and `ScaleUp.predict`.
    """
    scale = scale_of(option)
    law = fit_scale_up(runs_of_axis(study.laws, scale.axis))
    size = scale.value
    if scale.is_factor:
        size *= law.sizes[-1]
    table = law.predict(size, study.record.batch_sizes)
    lines = [f"scaled to {scale.axis} = {size:g}: {law.describe()}"]
    if law.is_power_known:
        critical = law.critical(size)
        middle = math.sqrt(critical.low * critical.high)
        lines.append(f"  B_crit there is {estimate(middle, critical)}")
    for row in table.to_dict("records"):
        steps = estimate(row["steps"], Interval(row["low"], row["high"]))
        lines.append(f"  B = {row['batch_size']:g}: {steps} steps")
    lines.append(
        f"  Brackets: 95 % interval. The goal is the same at every size, and sizes up to "
        f"{number_text(MAX_SCALE * law.sizes[-1], 3)} are answered."
    )
    return "\n".join(lines)
