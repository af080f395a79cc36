"""What objects keep in attributes is put back as it was, and what cannot be is told."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import nn

from lit_dps.training.hidden_state import capture_attributes, restore_attributes
from tests.support.errors import raises_about

Pair = namedtuple("Pair", "left right")


class Color(Enum):
    RED = 1
    BLUE = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.frozen = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.hidden, self.log = (nn.Linear(2, 2),), logging.getLogger("net")
        self.stages = [SimpleNamespace(n=0), SimpleNamespace(n=0)]
        self.stage = self.stages[0]


def there_and_back(tmp_path, change, check, net=Net, fresh=lambda net: None):
    """Changes one, saves it as a checkpoint is read, and puts all into a fresh one."""
    one, other = net(), net()
    change(one)
    fresh(other)
    torch.save(capture_attributes(one), tmp_path / "state.pt")
    before = {id(part) for part in (other.__dict__.get("stages"), other.__dict__.get("hidden"))}
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    restore_attributes(state, other, is_resume=True)
    assert {
        id(part) for part in (other.__dict__.get("stages"), other.__dict__.get("hidden"))
    } == before
    check(other)


@pytest.mark.parametrize(
    "value",
    [
        1,
        2.5,
        1j,
        "a",
        None,
        True,
        (1, [2, {"a": 3}]),
        {1: "x"},
        {1, 2},
        frozenset({3}),
        [],
        [1.0] * 5000,
        {(1, "a"): 1, 0.5: 2, None: 3, "b": 4},
        {(1, 2), (3, None)},
        [(step, {"loss": 0.5}) for step in range(3000)],
        {step: [step] for step in range(3000)},
        OrderedDict(b=1, a=2),
        Counter(a=2),
        torch.Size([2, 3]),
        {(4, torch.device("cuda:1")): 1, torch.device("cpu"): 2},
        {torch.float16: 1, (torch.Size([2, 3]), torch.channels_last): 2},
        {torch.Size([2, 3]), torch.device("meta")},
    ],
    ids=lambda value: type(value).__name__,  # texts of sets have no fixed order
)
def test_a_new_value_is_there_with_its_type(tmp_path, value):
    def check(net):
        assert net.new == value and type(net.new) is type(value)

    there_and_back(tmp_path, lambda net: setattr(net, "new", value), check)


def test_containers_are_filled_in_place_and_keep_their_types(tmp_path):
    def change(net):
        net.window, net.pair, net.color, net.number = (
            deque([1, 2]),
            Pair(1, torch.ones(2)),
            Color.BLUE,
            np.float32(0.5),
        )

    def fresh(net):
        net.window, net.pair, net.color, net.kept = (
            deque([7, 8, 9], maxlen=4),
            Pair(0, torch.zeros(2)),
            Color.RED,
            1,
        )
        net.old = net.window

    def check(net):
        assert net.window == deque([1, 2]) and net.window.maxlen == 4 and net.old is net.window
        assert (
            type(net.pair) is Pair
            and net.pair.left == 1
            and torch.equal(net.pair.right, torch.ones(2))
        )
        assert (net.color, net.number) == (Color.BLUE, 0.5)

    there_and_back(tmp_path, change, check, fresh=fresh)


def test_hidden_networks_and_flags_are_put_back_but_what_a_state_dict_has_is_not(tmp_path):
    def change(net):
        nn.init.constant_(net.hidden[0].weight, 3.0)
        nn.init.constant_(net.layer.weight, 5.0)
        net.frozen.eval()

    def check(net):
        assert (net.hidden[0].weight == 3).all() and isinstance(net.hidden[0].weight, nn.Parameter)
        assert not (net.layer.weight == 5).any()
        assert (net.training, net.layer.training, net.frozen.training) == (True, True, False)

    there_and_back(tmp_path, change, check)


def test_one_object_of_two_names_is_one_again(tmp_path):
    def change(net):
        net.stages[1].n = 4
        net.stage = net.stages[1]

    def check(net):
        assert net.stage is net.stages[1] and [stage.n for stage in net.stages] == [0, 4]

    there_and_back(tmp_path, change, check)


@pytest.mark.parametrize("pairs", [((1, 2), (3, 4)), ((1, 2),) * 2], ids=["two", "one"])
def test_tuples_of_one_object_are_restored_by_value(tmp_path, pairs):
    """A fresh module may use one constant for two attributes that differ later, and vice versa."""

    def change(net):
        net.first, net.second = pairs

    def fresh(net):
        net.first = net.second = (0, 0)

    def check(net):
        assert (net.first, net.second) == pairs

    there_and_back(tmp_path, change, check, fresh=fresh)


def test_loggers_are_left_alone(tmp_path):
    saved = capture_attributes(Net())
    logging.getLogger("net").setLevel(logging.ERROR)
    try:
        restore_attributes(saved, other := Net())
        assert other.log.level == logging.ERROR
    finally:
        logging.getLogger("net").setLevel(logging.NOTSET)


class Plain:
    pass


@pytest.mark.parametrize(
    ("former", "fresh"),
    [
        ({"a": 1, "b": 2}, {"b": 0, "a": 0, "c": 3}),
        ({Color.RED: 1, Color.BLUE: 2, nn.ReLU: 3}, {nn.ReLU: 0, Color.BLUE: 0, Color.RED: 0}),
        ({Color.RED: 1}, {Color.RED: 0, Color.BLUE: 0}),
        ({(Color.RED, 1): {Color.BLUE}}, {(Color.RED, 1): {Color.RED, Color.BLUE}}),
        (Counter(a=2), Counter(a=1, b=1)),
        (defaultdict(list, {"a": [1]}), defaultdict(list, {"b": [2]})),
        ({np.int64(3): 1}, {3: 0}),
        ([1], deque([2])),
        ((1, 2), Pair(3, 4)),
    ],
)
def test_collections_keep_keys_order_and_class(tmp_path, former, fresh):
    def check(net):
        assert net.new == former and type(net.new) is type(former)
        assert list(net.new) == list(former)

    there_and_back(
        tmp_path,
        lambda net: setattr(net, "new", former),
        check,
        fresh=lambda net: setattr(net, "new", fresh),
    )


def test_a_lazy_cache_by_size_and_device_is_filled_again(tmp_path):
    """A mask is made in the first forward pass, so a new module has no key."""

    def change(net):
        net.masks = {}
        x = torch.zeros(2, 3)
        net.masks[x.shape, x.dtype, x.device] = torch.tensor([1.0, 0.5])

    def check(net):
        [key] = net.masks
        assert key == (torch.Size([2, 3]), torch.float32, torch.device("cpu"))
        assert type(key[0]) is torch.Size and net.masks[key].tolist() == [1.0, 0.5]

    there_and_back(tmp_path, change, check, fresh=lambda net: setattr(net, "masks", {}))


def test_a_tensor_that_a_new_module_lacks_is_made_on_its_kind_of_device():
    net, other = Net(), Net()
    net.mask = torch.ones(2, device="meta")
    state = capture_attributes(net)
    for pair in state[0][1]:
        if pair[0] == "mask":
            state[0][1].remove(pair)
            kind = pair[1][0]
            # A checkpoint may be read onto another device.
            state[0][1].append(("mask", (kind, torch.ones(2))))
    restore_attributes(state, other, is_resume=True)
    assert other.mask.device.type == "meta"


@pytest.mark.parametrize("key", [torch.device("cpu"), (2, torch.device("cpu"))])
@pytest.mark.parametrize("collection", [dict.fromkeys, lambda keys: set(keys)])
def test_a_key_of_a_device_that_the_module_has_left_is_refused(key, collection):
    """The module would look up its new device, and make another mask."""
    net, other, moved = Net(), Net(), Net().to("meta")
    net.masks, other.masks, moved.masks = collection([key]), collection([]), collection([])
    state = capture_attributes(net)
    with pytest.raises(ValueError, match=r"Net\.masks has the key cpu"):
        restore_attributes(state, moved, is_resume=True)
    restore_attributes(state, other, is_resume=True)
    assert list(other.masks) == [key]
    # A state of a former version has no device.
    restore_attributes([state[0][:2]], moved, is_resume=True)
    assert list(moved.masks) == [key]


def test_a_tensor_that_a_new_module_lacks_is_made_on_the_device_of_the_module():
    net, other = Net(), Net().to("meta")
    net.mask, net.far = torch.ones(2), torch.ones(2, device="meta")
    state = capture_attributes(net)
    restore_attributes(state, other, is_resume=True)
    assert other.mask.device.type == "meta" and other.far.device.type == "meta"
    again = Net()
    restore_attributes(state, again, is_resume=True)
    assert again.mask.device.type == "cpu" and again.mask.tolist() == [1.0, 1.0]


UNCAPTURED = {
    "long list of tensors": [torch.zeros(100, 100) for _ in range(2000)],
    "long list": [[number] for number in range(60_000)],
    "dict by object": {Plain(): 1},
    "set of objects": {Plain()},
}


@pytest.mark.parametrize("value", UNCAPTURED.values(), ids=list(UNCAPTURED))
def test_a_new_process_refuses_collections_that_no_checkpoint_contains(tmp_path, value):
    def change(net):
        net.new = value

    with raises_about(ValueError, "Net.new "):
        there_and_back(tmp_path, change, lambda net: None, fresh=change)
    # In the same process the collection is still there.
    net = Net()
    net.new, net.number = value, 1
    before = capture_attributes(net)
    net.number = 2
    restore_attributes(before, net)
    assert net.new is value and net.number == 1


def test_data_leave_out_collections_that_no_checkpoint_contains(tmp_path):
    class Data(LightningDataModule):
        def __init__(self):
            super().__init__()
            self.pairs, self.by_object, self.epoch = [[1]] * 2000, {Plain(): 1, "a": 1}, 0
            self.cache = {("train", 0): torch.ones(1)}

    def change(data):
        data.pairs[0], data.by_object["a"], data.epoch = [2], 2, 3
        data.cache = {("val", 0): torch.ones(1)}

    def check(data):
        assert (data.epoch, data.pairs[0], data.by_object["a"]) == (3, [1], 2)
        assert len(data.by_object) == 2 and list(data.cache) == [("train", 0)]

    there_and_back(tmp_path, change, check, net=Data)


@pytest.mark.parametrize(
    ("former", "fresh"),
    [
        (deque([1], maxlen=3), None),
        (defaultdict(list, a=[1]), None),
        (Pair(1, 2), (1, 2)),
        (SimpleNamespace(n=1), Plain()),
        ({Color.RED: 1}, {}),
        ({(nn.ReLU, torch.float32): 1}, {}),
        ({len: 1}, {}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_object_of_another_class_is_not_restored(tmp_path, former, fresh):
    with raises_about(ValueError, "Net.new "):
        there_and_back(
            tmp_path,
            lambda net: setattr(net, "new", former),
            lambda net: None,
            fresh=lambda net: setattr(net, "new", fresh),
        )


@pytest.mark.parametrize("value", [iter([1, 2]), Plain()], ids=["iterator", "object"])
def test_an_error_names_what_cannot_be_restored(tmp_path, value):
    with raises_about(ValueError, "Net.new "):
        there_and_back(tmp_path, lambda net: setattr(net, "new", value), lambda net: None)


def test_an_object_that_stood_elsewhere_is_told(tmp_path):
    def build():
        net = Net()
        stages = vars(net).pop("stages")  # after the one of them
        net.stages = stages
        return net

    with raises_about(ValueError, "Net.stages.0 "):
        there_and_back(
            tmp_path, lambda net: setattr(net, "stage", net.stages[1]), lambda net: None, net=build
        )


def test_data_keep_numbers_and_not_their_examples(tmp_path):
    class Data(LightningDataModule):
        def __init__(self):
            super().__init__()
            self.x, self.names, self.epoch, self.order = torch.zeros(5), ["a"] * 2000, 0, iter([1])

    def change(data):
        data.x += 1
        data.names[0], data.epoch = "b", 3

    def check(data):
        assert (data.epoch, data.names[0], float(data.x.sum())) == (3, "a", 0.0)

    there_and_back(tmp_path, change, check, net=Data)
