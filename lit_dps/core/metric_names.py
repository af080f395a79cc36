"""What the name of a metric suggests: whether it rises, and whether it is a share of examples."""

from __future__ import annotations

import re

# Lightning adds this suffix if there are several validation dataloaders.
_LOADER_SUFFIX = re.compile(r"/dataloader_idx_\d+$")

# Words in names of metrics that rise, such as val_acc, val/top1 and MulticlassF1Score.
_RISING = re.compile(
    r"acc(uracy)?|top_?\d+|f1(score)?|auc|auroc|precision|recall|iou|jaccard|dice|map|ap|r2(score)?"
    r"|psnr|ssim|bleu|rouge|reward|return|likelihood|correct|hits?",
    re.IGNORECASE,
)
# Words in names of metrics that fall, also beside a word above: "1" is for 1 - accuracy.
_FALLING = re.compile(
    r"error|err|loss|nll|neg|negative|minus|inv|miss|wrong|1|mse|mae|rmse|mape|distance|dist|gap"
    r"|regret|kl|ce|bce|perplexity|ppl"
)
_WORD = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*|\d+")


# Words in names of metrics that are shares, so that a value above 1 is in percent.
_SHARE = re.compile(
    r"acc(uracy)?|top_?\d+|f1(score)?|auc|auroc|precision|recall|iou|dice", re.IGNORECASE
)


def is_share(metric: str) -> bool:
    """Return True if the name of a metric suggests a share of examples, such as an accuracy."""
    return any(_SHARE.fullmatch(word) for word in _words(metric))


def is_rising(metric: str) -> bool:
    """Return True if the name of a metric suggests that higher values are better."""
    words = _words(metric)
    if any(_FALLING.fullmatch(word) for word in words):
        return False
    return any(_RISING.fullmatch(word) for word in words)


def _words(metric: str) -> set[str]:
    """Return the words in the name of a metric, in small letters."""
    name = _LOADER_SUFFIX.sub("", metric)
    parts = [*_WORD.findall(name), *re.split(r"[^A-Za-z0-9]+", name)]
    return {part.lower() for part in parts}
