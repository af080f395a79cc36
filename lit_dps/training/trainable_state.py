"""Saves which parameters a run trains, in which optimizer groups, and the modes of submodules.

Lightning's checkpoint contains none of these (Lightning issue 21901). Without them, a run that
unfreezes a backbone, adds a parameter group or sets a submodule to evaluation mode would resume in
its initial configuration.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lit_dps.pruning.attributes import hidden_tensors

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
    for optimizer, known in zip(trainer.optimizers, saved, strict=True):
        now = _groups(optimizer, module)
        if now["class"] != known["class"]:
            raise ValueError(f"its optimizer is {now['class']}, and was {known['class']}")
        if now["groups"] != known["groups"]:
            optimizer.param_groups = _rebuilt(optimizer, known["groups"], parameters)
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
    if parameters.keys() != state["requires_grad"].keys():
        names = ", ".join(sorted(parameters.keys() ^ state["requires_grad"].keys()))
        raise ValueError(f"it has other parameters than it had: {names}")
    for name, parameter in parameters.items():
        if parameter.requires_grad != state["requires_grad"][name]:
            parameter.requires_grad_(state["requires_grad"][name])
    parts = dict(module.named_modules())
    if parts.keys() != state["modules"].keys():
        names = ", ".join(sorted(parts.keys() ^ state["modules"].keys()))
        raise ValueError(f"it has other submodules than it had: {names}")
    for name, part in parts.items():
        kind, training = state["modules"][name]
        if type(part).__qualname__ != kind:
            raise ValueError(f"its {name} is {type(part).__qualname__}, and was {kind}")
        part.training = training
    if [_groups(optimizer, module) for optimizer in trainer.optimizers] != state["optimizers"]:
        raise ValueError("its optimizers have other parameter groups than they had")


def _class_and_mode(part: Any) -> tuple[str, bool]:
    return type(part).__qualname__, part.training


def _parameters(module: LightningModule) -> dict[str, Tensor]:
    """Return the tensors that an optimizer may train, by name, also from lists and dicts."""
    named = dict(module.named_parameters(remove_duplicate=False))
    return {**hidden_tensors(module), **named}


def _groups(optimizer: Optimizer, module: LightningModule) -> dict[str, Any]:
    names: dict[int, str] = {}
    for name, tensor in _parameters(module).items():
        names.setdefault(id(tensor), name)
    groups = [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
    return {"class": type(optimizer).__qualname__, "groups": groups}


def _rebuilt(
    optimizer: Optimizer, groups: list[list[str | None]], parameters: dict[str, Tensor]
) -> list[dict[str, Any]]:
    """Return groups with these parameters.

    A group gets the options of the current group with its number, or of the first group.
    """
    rebuilt = []
    for i, names in enumerate(groups):
        missing = [name for name in names if name not in parameters]
        if missing:
            raise ValueError(f"a parameter of its optimizer is missing: {missing[0]}")
        number = i if i < len(optimizer.param_groups) else 0
        options = optimizer.param_groups[number]
        rebuilt.append({**options, "params": [parameters[name] for name in names]})
    return rebuilt
