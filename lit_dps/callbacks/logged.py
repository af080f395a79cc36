"""Whether what a module logs in a check is the mean over the entire validation split."""

from __future__ import annotations

import re

from lightning.pytorch import Trainer

from lit_dps.callbacks.validation import ValidationCount

_INDEX = re.compile(r"(?P<name>.*)/dataloader_idx_(?P<index>\d+)")
# Metrics that are to be maximised, by the words of their names: val_acc, val/top1, MulticlassF1Score
_RISING = re.compile(
    r"acc(uracy)?|top_?\d+|f1(score)?|auc|auroc|precision|recall|iou|jaccard|dice|map|ap|r2(score)?|psnr|ssim|bleu|rouge"
    r"|reward|return|likelihood|correct|hits?",
    re.IGNORECASE,
)
_FALLING = {
    *("error", "err", "loss", "nll", "neg", "negative", "minus", "inv", "miss", "wrong", "1"),  # 1 - accuracy
    *("mse", "mae", "rmse", "mape", "distance", "dist", "gap", "regret", "kl", "ce", "bce", "perplexity", "ppl"),
}
_WORD = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*|\d+")


def rises(name: str) -> bool:
    """Whether a metric's name says that more of it is better."""
    plain = _INDEX.sub(r"\g<name>", name)
    words = {word.lower() for word in (*_WORD.findall(plain), *re.split(r"[^A-Za-z0-9]+", plain))}
    if words & _FALLING:
        return False
    return any(_RISING.fullmatch(word) for word in words)


def why_no_mean(trainer: Trainer, monitor: str, validated: ValidationCount) -> str | None:
    """Why a metric of the validation that just ended is no mean over its entire split; None if it is, or may be.

    What a module makes itself at the end of the epoch, and what a torchmetrics object computes, is taken as it is.

    Args:
        trainer: The trainer, in `on_validation_end`.
        monitor: Name of the metric.
        validated: What was validated.
    """
    match = _INDEX.fullmatch(monitor)
    name, index = (match["name"], int(match["index"])) if match else (monitor, 0)
    for metric in (trainer._results or {}).values():
        meta = metric.meta
        if meta.name != name or meta.fx != "validation_step" or (match and meta.dataloader_idx != index):
            continue
        if not meta.on_epoch:
            return "it is logged with on_epoch=False, so that it is of the last batch alone"
        if not metric.is_tensor:
            return None
        if not meta.is_mean_reduction:
            return (
                f"it is logged with reduce_fx={getattr(meta.reduce_fx, '__name__', meta.reduce_fx)}, which is no mean"
            )
        logged, weight = metric._update_count, int(metric.cumulated_batch_size)
        if logged < validated.batches[index]:
            return f"it is logged in {logged} of {validated.batches[index]} validation batches"
        # a weight for each example, or for each of its tokens, is a multiple of them; the same for each batch is not
        if index in validated.uneven and weight % logged == 0 and weight % validated.examples[index]:
            return f"it is logged with batch_size={weight // logged} over batches of different size"
    return None
