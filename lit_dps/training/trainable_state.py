"""Saves and restores which parameters a run trains, in which groups, and the modes of submodules.

For example, a callback that unfreezes a backbone in epoch 5 sets `requires_grad` and adds a
parameter group to the optimizer. Lightning's checkpoint contains neither (Lightning issue 21901).
A run that resumes in epoch 6 would train the head only, or fail to load the optimizer. The same
holds for a submodule that was set to evaluation mode.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lit_dps.pruning.mask import hidden_tensors

State = dict[str, Any]


def capture_trainable(trainer: Trainer, module: LightningModule) -> State:
    """Return which parameters a running fit trains, as plain values.

    Returns:
        "requires_grad": whether each parameter is trained, by name. "modules": class and training
        mode of each submodule, by name. "optimizers": the class of each optimizer, and in "groups"
        the names of the parameters of each group; None for a parameter outside of the module.
    """
    parameters = module.named_parameters(remove_duplicate=False)
    return {
        "requires_grad": {name: parameter.requires_grad for name, parameter in parameters},
        "modules": {name: _class_and_mode(part) for name, part in module.named_modules()},
        "optimizers": [_groups(optimizer, module) for optimizer in trainer.optimizers],
    }


def prepare_trainable(state: State, trainer: Trainer, module: LightningModule) -> None:
    """Restore frozen parameters and the groups of optimizers, before their states are loaded.

    Call this after the optimizers were configured. The states contain the options of the groups.

    Raises:
        ValueError: if the optimizers differ, or if a parameter of a group is missing.
    """
    saved = state["optimizers"]
    if len(saved) != len(trainer.optimizers):
        raise ValueError(f"it has {len(trainer.optimizers)} optimizers, and had {len(saved)}")
    parameters = _parameters(module)
    for optimizer, saved_optimizer in zip(trainer.optimizers, saved, strict=True):
        current = _groups(optimizer, module)
        if current["class"] != saved_optimizer["class"]:
            saved_class = saved_optimizer["class"]
            raise ValueError(f"its optimizer is {current['class']}, and was {saved_class}")
        if current["groups"] != saved_optimizer["groups"]:
            optimizer.param_groups = _rebuilt(optimizer, saved_optimizer["groups"], parameters)
    for name, requires_grad in state["requires_grad"].items():
        if name in parameters:
            parameters[name].requires_grad_(requires_grad)


def restore_trainable(state: State, trainer: Trainer, module: LightningModule) -> None:
    """Restore frozen parameters and modes, before the first step.

    Hooks that run when training starts may have changed them since `prepare_trainable`.

    Raises:
        ValueError: if parameters, submodules or groups of optimizers differ from the saved ones.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    _check_names(parameters, state["requires_grad"], "parameters")
    for name, parameter in parameters.items():
        if parameter.requires_grad != state["requires_grad"][name]:
            parameter.requires_grad_(state["requires_grad"][name])
    submodules = dict(module.named_modules())
    _check_names(submodules, state["modules"], "submodules")
    for name, submodule in submodules.items():
        saved_class, training = state["modules"][name]
        current_class = type(submodule).__qualname__
        if current_class != saved_class:
            raise ValueError(f"its {name} is {current_class}, and was {saved_class}")
        submodule.training = training
    if [_groups(optimizer, module) for optimizer in trainer.optimizers] != state["optimizers"]:
        raise ValueError("its optimizers have other parameter groups than they had")


def _check_names(current: dict[str, Any], saved: dict[str, Any], kind: str) -> None:
    """Raise ValueError if the names differ."""
    if current.keys() != saved.keys():
        names = ", ".join(sorted(current.keys() ^ saved.keys()))
        raise ValueError(f"it has other {kind} than it had: {names}")


def _class_and_mode(part: Any) -> tuple[str, bool]:
    return type(part).__qualname__, part.training


def _parameters(module: LightningModule) -> dict[str, Tensor]:
    """Return the tensors that an optimizer may train, by name, also from lists and dicts."""
    named = dict(module.named_parameters(remove_duplicate=False))
    return {**hidden_tensors(module), **named}


def _groups(optimizer: Optimizer, module: LightningModule) -> dict[str, Any]:
    """Return the class of an optimizer, and the names of the parameters of each group."""
    names: dict[int, str] = {}
    for name, tensor in _parameters(module).items():
        names.setdefault(id(tensor), name)
    groups = []
    for group in optimizer.param_groups:
        groups.append([names.get(id(parameter)) for parameter in group["params"]])
    return {"class": type(optimizer).__qualname__, "groups": groups}


def _rebuilt(
    optimizer: Optimizer, groups: list[list[str | None]], parameters: dict[str, Tensor]
) -> list[dict[str, Any]]:
    """Return groups with these parameters.

    A group gets the options of the current group with its number, or of the first group.
    """
    rebuilt = []
    for i, names in enumerate(groups):
        group = []
        for name in names:
            if name is None or name not in parameters:
                raise ValueError(f"a parameter of its optimizer is missing: {name}")
            group.append(parameters[name])
        number = i if i < len(optimizer.param_groups) else 0
        rebuilt.append({**optimizer.param_groups[number], "params": group})
    return rebuilt
