"""From scores to a mask: one global top-k."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lit_dps.errors import ConfigError
from lit_dps.pruning.mask import Mask
from lit_dps.trial import KEPT, PRUNABLE, TRAINED, UNSCORED, check_sparsity


def top_k(scores: Mapping[str, Tensor], sparsity: float) -> Mask:
    """Keeps the round(m (1 - sparsity)) highest of all m scores.

    Python's rounding (half to even); ties go to the lower index in the order of the scores, as TensorFlow's top_k does
    in the authors' code.

    Raises:
        ConfigError: if the sparsity is outside [0, 1), or leaves no parameter.
    """
    check_sparsity("pruning.sparsity", sparsity)
    flat = torch.cat([score.flatten() for score in scores.values()])
    keep = round(len(flat) * (1 - sparsity))
    if keep == 0:
        raise ConfigError("pruning.sparsity", sparsity, f"at least one of {len(flat)} parameters must be kept")
    order = torch.sort(flat, descending=True, stable=True).indices
    kept = torch.zeros(len(flat), dtype=torch.bool, device=flat.device)
    kept[order[:keep]] = True
    parts = kept.split([score.numel() for score in scores.values()])
    return Mask({name: part.view(scores[name].shape) for name, part in zip(scores, parts, strict=True)})


def worth_knowing(mask: Mask, scores: Mapping[str, Tensor], trained: int) -> dict[str, float]:
    """What a reader of the table should know of a mask, as in `TrialResult.observed`; mostly nothing.

    Args:
        mask: The mask.
        scores: The scores that it was made from.
        trained: Elements of all parameters that are trained.
    """
    by_place = sum(int((scores[name] == 0)[keep].sum()) for name, keep in mask.items())
    kept, total = (sum(counts) for counts in zip(*mask.kept().values(), strict=True))
    found = {UNSCORED: by_place, KEPT: kept} if by_place else {}
    return found | ({PRUNABLE: total, TRAINED: trained} if 2 * total < trained else {})
