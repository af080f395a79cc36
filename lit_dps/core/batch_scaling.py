"""Scales the second moment and weight decay of an Adam-like rule with the batch size."""

BETA2_FLOOR = 0.95


def scaled_beta2(beta2: float, factor: float) -> float:
    """Return beta2^(B / B0), but at least 0.95. A beta2 below 0.95 is not raised.

    The power keeps the half-life of the second moment in examples (Marek et al. 2025, arXiv
    2507.07101). Large runs spiked below the floor (github.com/marin-community/marin, pull request
    2447).

    Args:
        beta2: beta2 at B0.
        factor: B / B0.
    """
    return max(beta2**factor, min(beta2, BETA2_FLOOR))


def scaled_decay(weight_decay: float, factor: float, rate_ratio: float) -> float:
    """Return lambda (B / B0) (eta0 / eta), which keeps the time scale of AdamW in examples.

    The time scale is B / (eta lambda) (Bergsma et al. 2025, arXiv 2505.13738).

    Args:
        weight_decay: lambda at B0 and rate eta0.
        factor: B / B0.
        rate_ratio: eta / eta0, where eta is the rate at B.
    """
    return weight_decay * factor / rate_ratio
