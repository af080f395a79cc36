"""Pruning at initialization: scores, a global top-k, and the mask."""

from lit_dps.pruning.mask import Mask, prunable
from lit_dps.pruning.prune import top_k, worth_knowing
from lit_dps.pruning.scores import SCORES, signed_saliency, snip, take_scores

__all__ = ["SCORES", "Mask", "prunable", "signed_saliency", "snip", "take_scores", "top_k", "worth_knowing"]
