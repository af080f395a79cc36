"""How the second moment and weight decay of an Adam-like rule follow the batch size."""

BETA2_FLOOR = 0.95


def scaled_beta2(beta2: float, factor: float) -> float:
    """Return beta2^(B / B0), which keeps the half-life of the second moment in examples, but at least 0.95.

    Marek et al. 2025, arXiv 2507.07101. The floor: below it large runs spiked, github.com/marin-community/marin, pull
    request 2447. A beta2 that is lower at B0 is not raised.

    Args:
        beta2: At B0.
        factor: B / B0.
    """
    return max(beta2**factor, min(beta2, BETA2_FLOOR))


def scaled_decay(weight_decay: float, factor: float, rate_ratio: float) -> float:
    """Return lambda (B / B0) (eta0 / eta), which keeps how many examples the weights remember.

    That number is B / (eta lambda), the time scale of AdamW (Bergsma et al. 2025, arXiv 2505.13738).

    Args:
        weight_decay: lambda, at B0 and rate eta0.
        factor: B / B0.
        rate_ratio: eta / eta0, of the rate that is in use at B.
    """
    return weight_decay * factor / rate_ratio
