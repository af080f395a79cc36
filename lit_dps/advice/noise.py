"""What the gradient noise scale of one run says of the critical batch size
(`lit_dps.core.noise_scale` estimates it).

The noise scale phi = tr(Sigma) / |G|^2 is the batch size at which the noise of a gradient is as
large as the gradient (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", Section
2.2 and appendix A.1).
"""

from __future__ import annotations

import math

from lit_dps.core.noise_scale import NoiseScale

# Standard deviation of log(noise scale / B_crit of the law) on public runs: 0.67, 0.87, 0.97 and
# 4.1 as ratios, and as large or larger elsewhere. As a prior of B_crit for
# `lit_dps.analysis.law.law_of`.
PRIOR_SPREAD = 1.0


def expected_critical(scale: NoiseScale) -> tuple[float, float] | None:
    """What a noise scale says of B_crit, for `lit_dps.analysis.law.law_of`: [examples], and how
    uncertain its log is.

    None where it is not resolved. Its own error is added to how far noise scales were off on public
    runs.
    """
    if not scale.resolved or scale.low <= 0:
        return None
    return scale.value, math.hypot(PRIOR_SPREAD, math.log(scale.high / scale.low) / 3.92)
