"""What determines how an object trains: attributes, members of classes, facts of modules."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from dataclasses import MISSING
from enum import Enum
from typing import Any, NamedTuple

from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import MeanMetric, Metric

from lit_dps.core.aliases import RENAMED_METHODS
from lit_dps.training.code_tree import attribute_or_none
from lit_dps.training.object_paths import is_of_user

LAZY = "lazy"
_NORM = nn.modules.batchnorm._NormBase  # training changes its buffers
# Members of a class that Python makes, in other ways in each version, or that decide nothing.
_MADE_BY_PYTHON = (
    *("__module__", "__doc__", "__dict__", "__weakref__", "__qualname__", "__firstlineno__"),
    *("__static_attributes__", "__annotations__", "__annotate_func__", "__annotations_cache__"),
    *("__slotnames__", "__match_args__", "__abstractmethods__", "_abc_impl", "__type_params__"),
    *("__classdictcell__", "__conditional_annotations__", "__signature__"),
)
_FIELDS_OF_PYDANTIC = "__pydantic_fields__"
_MODULES_OF_MADE = ("dataclasses", "collections", "typing", "enum")


@functools.cache
def _set_by_libraries() -> frozenset[str]:
    """Return the attributes that PyTorch, Lightning and torchmetrics set, and the mode."""
    names = {"training", "trainer", "_hparams", "_hparams_name", "_hparams_initial"}
    names.add("_flat_weight_refs")  # of recurrent layers
    # Of `net.compile()` and `torch.compile(net)`.
    names |= {"_compiled_call_impl", "_compiler_ctx", "_compile_kwargs", "_is_torch_compile"}
    for item in (LightningModule(), LightningDataModule(), MeanMetric()):
        names.update(name for name in vars(item) if name.startswith("_"))
    return frozenset(names)


def attributes_of(item: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object by name, also of `__slots__`.

    Private attributes count if the class is of the user. Attributes that libraries set, and values
    that a descriptor such as `functools.cached_property` keeps, are left out.
    """
    skipped: set[str] = set()
    if isinstance(item, (nn.Module, LightningDataModule)):
        skipped |= _set_by_libraries()
    if isinstance(item, Metric):
        skipped |= item._defaults.keys()
    values = {}
    for cls in type(item).__mro__:
        for slot, member in vars(cls).items():
            value = None
            if isinstance(member, types.MemberDescriptorType):
                value = attribute_or_none(item, slot)
            if value is not None and value is not MISSING:
                values[slot] = value
    values |= getattr(item, "__dict__", {})
    has_private = is_of_user(type(item))
    for name, value in values.items():
        is_skipped = name in skipped or _is_kept(type(item), str(name))
        if not is_skipped and (has_private or not str(name).startswith("_")):
            yield str(name), value


def _is_kept(cls: type, name: str) -> bool:
    """Return True for a value that a descriptor of a class has computed and keeps."""
    member = inspect.getattr_static(cls, name, None)
    is_descriptor = hasattr(type(member), "__get__") and not hasattr(type(member), "__set__")
    return is_descriptor and not callable(member)


def members_of(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the members that the body or a decorator of a class defines, by name."""
    members = vars(cls)
    values: dict[str, Any] = {}
    if issubclass(cls, Enum):
        values = dict(cls.__members__)
    has_made = issubclass(cls, Enum) or "__dataclass_fields__" in members or "_fields" in members
    adopted = {new: members.get(former) for former, new in RENAMED_METHODS.items()}
    for name, member in sorted(members.items()):
        is_made = name in _MADE_BY_PYTHON or isinstance(member, types.MemberDescriptorType)
        if name.startswith("__pydantic_") and name != _FIELDS_OF_PYDANTIC:
            is_made = True
        if name in adopted and member is adopted[name]:
            is_made = True  # by `adopt_former_methods`
        function = attribute_or_none(member, "__func__") or member
        if isinstance(function, types.FunctionType):
            is_made = is_made or (has_made and _is_made(function, name))
        elif issubclass(cls, Enum):
            is_made = is_made or name in values or name.startswith("_")
        if not is_made:
            yield name, member
    yield from values.items()


def _is_made(function: types.FunctionType, name: str) -> bool:
    """Return True for a method that Python makes for a dataclass, a NamedTuple or an Enum."""
    inner = inspect.unwrap(function)
    module = str(getattr(inner, "__globals__", {}).get("__name__"))
    if module in _MODULES_OF_MADE or module.startswith("namedtuple_"):
        return True
    file = getattr(getattr(inner, "__code__", None), "co_filename", "")
    return name.startswith("__") and file == "<string>"


class Fact(NamedTuple):
    """A property of a module.

    Attributes:
        name: Its name in messages.
        place: The dotted path of the attribute or submodule that has it.
        value: Its value.
    """

    name: str
    place: str
    value: Any


def facts_of_module(module: nn.Module, with_modes: bool = True) -> Iterator[Fact]:
    """Yield what determines how a module and its submodules train, except values of weights."""
    first: dict[int, str] = {}
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        shown = path or "the module"
        for name, weight in part._parameters.items():
            place = f"{prefix}{name}"
            text = _weight_text(weight)
            if weight is not None and first.setdefault(id(weight), place) != place:
                text += f", tied to {first[id(weight)]}"
            yield Fact(place, place, text)
        hooks = _hooks_of(part)
        yield Fact(f"the class of {shown}", path, type(part))
        yield Fact(f"the number of hooks of {shown}", path, len(hooks))
        if hooks:
            yield Fact(f"the hooks of {shown}", f"{prefix}hooks", hooks)
        if with_modes:
            yield Fact(f"the mode of {shown}", path, "train" if part.training else "eval")
        for name, value in attributes_of(part):
            yield Fact(f"{prefix}{name}", f"{prefix}{name}", value)
        for name, buffer in part._buffers.items():
            value = _weight_text(buffer) if isinstance(part, _NORM) else buffer
            yield Fact(f"{prefix}{name}", f"{prefix}{name}", value)


def _hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks of the forward and backward passes of a module, and of its weights."""
    tables: list[Any] = [module._forward_pre_hooks, module._forward_hooks]
    tables += [module._backward_pre_hooks, module._backward_hooks]
    tables += [getattr(weight, "_backward_hooks", None) for weight in module._parameters.values()]
    hooks = []
    for table in tables:
        hooks.extend((table or {}).values())
    return hooks


def _weight_text(weight: Tensor | None) -> str:
    """Return the shape and type of a weight, and whether it is trained."""
    if weight is None:
        return "None"
    return f"{shape_of(weight)} {weight.dtype}{' trained' * weight.requires_grad}"


def shape_of(item: Any) -> tuple[int, ...] | str:
    """Return the shape of a tensor or array; `LAZY` for a parameter without a shape yet."""
    if is_lazy(item):
        return LAZY
    if getattr(item, "is_nested", False):
        return "nested"
    return tuple(item.shape)
