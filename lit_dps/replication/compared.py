"""Which studies may be compared: what they trained, on what, by which rule."""

from __future__ import annotations

from collections.abc import Mapping

from lit_dps.core.record import StudyRecord, setting

RULE = "model.init_args.optimizer"
RATES = ("learning_rate", "momentum")  # of the update rule


def searched(record: StudyRecord) -> bool:
    """Whether a study searched for its K*, and not took the best points of another
    (study.best_of)."""
    return setting(record.config, "study.best_of") is None


def goal_of(record: StudyRecord) -> tuple[str, int]:
    """A study's goal, and how often it is asked for: K* of others are of other runs."""
    return str(record.goal), record.goal.check_interval


def trained(record: StudyRecord) -> dict[str, object]:
    """What was trained on what, how it was pruned, and by which schedule, but for the update rule
    and its goal.

    The values that a configuration gives, by key, and not those that were searched. Configurations
    of earlier versions lack keys, which are then at their defaults: compare what both have.
    """
    found = {key: setting(record.config, key) for key in ("data.class_path", "model.class_path")}
    for section in ("data.init_args", "model.init_args", "pruning", "optim", "local"):
        found |= _leaves(setting(record.config, section), section)
    found.setdefault("model.init_args.schedule", "constant")
    apart = {
        "batch_size",
        "root",
        "sparsity",
        "optimizer",
        *RATES,
        *(key.rsplit(".", 1)[-1] for key in record.space),
    }
    return {key: value for key, value in found.items() if key.rsplit(".", 1)[-1] not in apart}


def alike(record: StudyRecord, other: StudyRecord) -> bool:
    """Whether two studies trained the same (`trained`)."""
    ours, theirs = trained(record), trained(other)
    return all(ours[key] == theirs[key] for key in ours.keys() & theirs.keys())


def _leaves(node: object, name: str) -> dict[str, object]:
    if not isinstance(node, Mapping):
        return {name: node}
    return {
        key: leaf
        for part, value in node.items()
        for key, leaf in _leaves(value, f"{name}.{part}").items()
    }
