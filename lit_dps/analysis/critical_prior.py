"""Priors of B_crit: what is known of the curve K(B) from fewer K than the law needs.

A noise scale that was read along a run to the goal is close to B_crit. Without one, public runs
show how far B_crit usually is from the batch size that somebody trains at.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from lit_dps.core.noise_scale import NoiseScale

NORMAL_95_WIDTH = 3.92  # of a 95 % interval, in standard deviations


class CriticalPrior(NamedTuple):
    """B_crit by other evidence than K: log B_crit follows Student's t, with few degrees of freedom.

    Attributes:
        value: The median, in examples.
        log_deviation: The scale of its logarithm.
        source: The evidence of the prior, as a noun phrase.
    """

    value: float
    log_deviation: float
    source: str = "other evidence"


class _Ratio(NamedTuple):
    """Median and scale of the log of a ratio to B_crit."""

    log_median: float
    deviation: float


# log(B_crit / noise scale), of the second half of a run to the goal. Runs of Pollux (Qiao et al.
# 2021) at three batch sizes, SGD: -0.3 to -1.0 (cifar10), -0.6 to 0.3 (imagenet) and -0.1 to -0.5
# (yolov3); BERT with Adam above 0.5. A prototype of this method, where K is the best of several
# rates and seeds: -0.1 (MNIST, SGD with momentum), 1.2 (MNIST, AdamW), 0.1 (a character
# transformer, AdamW). With these numbers the 80 % intervals from one K contain 93 % of 58 other K
# of Pollux, and 12 of the 13 K of the prototype. So few sources do not support narrower ones.
SGD_RATIO = _Ratio(0.0, 0.4)
ADAM_RATIO = _Ratio(0.6, 0.5)
UNKNOWN_RATIO = _Ratio(0.3, 0.6)
# log(B_crit / batch size of a run). K is predicted from one K, at each of the lower half of the
# batch sizes of 19 public workloads. With these numbers the 80 % intervals contain 82 % of the
# other K. Winkler's score is the best or near it, whichever of the four sources is left out.
DEFAULT_RATIO = _Ratio(math.log(16), 1.2)


def default_prior(batch_size: float) -> CriticalPrior:
    """Return the prior of B_crit if only the batch size of a run is known."""
    value = batch_size * math.exp(DEFAULT_RATIO.log_median)
    return CriticalPrior(value, DEFAULT_RATIO.deviation, "public runs")


def noise_scale_prior(scale: NoiseScale, is_adaptive: bool | None = None) -> CriticalPrior | None:
    """Return the prior of B_crit by the noise scale of the second half of a run to the goal.

    The noise scale phi = tr(Sigma) / |G|^2 is the batch size at which the noise of a gradient is as
    large as the gradient (McCandlish et al. 2018, Section 2.2 and appendix A.1). It grows along
    training, so that a reading of an untrained network is of no use here.

    Args:
        scale: Read in the second half of the run, at the batch size of the run.
        is_adaptive: Whether the optimizer is like Adam; None if that is unknown.

    Returns:
        None if the noise scale is not resolved.
    """
    if not scale.resolved or scale.low <= 0:
        return None
    if is_adaptive is None:
        ratio = UNKNOWN_RATIO
    elif is_adaptive:
        ratio = ADAM_RATIO
    else:
        ratio = SGD_RATIO
    error_of_reading = math.log(scale.high / scale.low) / NORMAL_95_WIDTH
    deviation = math.hypot(ratio.deviation, error_of_reading)
    return CriticalPrior(scale.value * math.exp(ratio.log_median), deviation, "the noise scale")
