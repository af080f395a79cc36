"""A copy of a module shares nothing with it that training changes, also where functions refer to
the module."""

import os
import threading
from itertools import count

import torch
from torch import nn

from lit_dps.core.errors import UserError
from lit_dps.training.training_pass import copy_of
from tests.support.errors import refuses
from tests.support.tiny import Plain, points


class Hooked(Plain):
    """Collects features by a hook, and calls a layer by a function that it keeps."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)))
        self.features, self.lock, self.generator = (
            [],
            threading.Lock(),
            torch.Generator().manual_seed(3),
        )
        self.network[0].register_forward_hook(
            lambda module, args, output: self.features.append(output)
        )
        self.first = lambda x: self.network[0](x)
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen += 1
        self.noise = torch.rand(2, generator=self.generator)
        return (
            nn.functional.cross_entropy(self.network[1](self.first(x)), y) + self.features[-1].sum()
        )


def test_a_step_of_the_copy_is_one_of_the_module_and_leaves_no_trace_in_it():
    module, batch = Hooked(), points().tensors
    twin = copy_of(module)
    loss = twin.training_step(batch, 0)
    reached = torch.autograd.grad(loss, list(twin.parameters()), allow_unused=True)
    assert all(gradient is not None for gradient in reached)
    assert module.features == [] and len(twin.features) == 1
    assert int(module.seen) == 0 and int(twin.seen) == 1
    assert twin.lock is module.lock and twin.generator is not module.generator
    assert torch.equal(module.training_step(batch, 0), loss)
    assert torch.equal(module.noise, twin.noise)


def test_what_a_backward_pass_left_is_copied_too():
    module = Hooked()
    module.last = module.network(points().tensors[0])
    twin = copy_of(module)
    assert torch.equal(twin.last, module.last) and twin.last is not module.last


class Drawing(Plain):
    """Scales its loss by the next number of a generator, which cannot be copied."""

    def __init__(self):
        super().__init__(nn.Linear(4, 3))
        self.scales = (1 / number for number in count(1))
        self.numbers = {"offset": iter([1.0, 2.0])}
        self.log_file = open(os.devnull)  # noqa: SIM115

    def training_step(self, batch, batch_idx):
        offset = next(self.numbers["offset"])
        return super().training_step(batch, batch_idx) * next(self.scales) + offset


def test_a_step_of_the_copy_takes_no_item_from_an_iterator_of_the_training():
    module = Drawing()
    twin = copy_of(module)
    assert twin.log_file is module.log_file, "a file is shared"
    with refuses("model", "Drawing", UserError) as refused:
        twin.training_step(points().tensors, 0)
    assert "would change the training" in str(refused.value)
    module.log_file.close()
    assert next(module.scales) == 1.0, "the first item"
    assert next(module.numbers["offset"]) == 1.0, "this iterator can be copied"
