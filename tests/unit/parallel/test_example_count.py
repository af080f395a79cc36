"""How many examples a batch has: by the indices that its loader drew, or by what grows with the
batch size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

from lit_dps.core.errors import ConfigError, UserError
from lit_dps.parallel.ddp import ShardLoader, trainer_arguments
from lit_dps.parallel.example_count import Sizes, can_be_cut, counted, cut
from lit_dps.readings import NoiseScaleCallback
from lit_dps.training import PruningCallback
from lit_dps.training.example_count import examples_of, full_batch_size, record_batches
from lit_dps.training.step_count import ExamplesCallback
from tests.support.ranks import on_ranks, same_on_ranks
from tests.support.tiny import QUIET, Plain, fit, loader

N = 11


def rows(n: int = N) -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(2 + i % 3, 4, generator=generator), i % 3) for i in range(n)]


def labels(items) -> torch.Tensor:
    return torch.tensor([y for _, y in items])


def time_first(items):
    return torch.stack([x[:2] for x, _ in items], 1), labels(items)


def detection(items):
    return [x for x, _ in items], [{"boxes": x, "label": torch.tensor(y)} for x, y in items]


def packed(items):
    return pack_sequence([x for x, _ in items], enforce_sorted=False), labels(items)


def ragged(items):
    lengths = torch.tensor([len(x) for x, _ in items])
    return torch.cat([x for x, _ in items]), torch.cat(
        [torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]
    )


def scalar_first(items):
    return {
        "scale": torch.tensor(1.0),
        "mask": torch.ones(7, 7),
        "x": torch.stack([x[:2] for x, _ in items]),
    }


KINDS = [time_first, detection, packed, ragged, scalar_first]


class Buckets(Sampler):
    """Batches of one class each; the first of all is short."""

    def __iter__(self):
        return iter([[0, 3], [1, 4, 7, 10], [2, 5, 8], [6, 9]])

    def __len__(self):
        return 4


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("collate", KINDS)
def test_examples_are_the_indices_that_a_loader_draws(collate, workers):
    data = DataLoader(rows(), 4, collate_fn=collate, num_workers=workers)
    kind = type(data.batch_sampler)
    assert [number for _, number in counted(data)] == [4, 4, 3]
    assert isinstance(data, DataLoader) and type(data.batch_sampler) is kind


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_processes_that_draw_ahead_and_stay_count_each_pass(workers):
    data = DataLoader(rows(), batch_sampler=Buckets(), collate_fn=ragged, num_workers=workers)
    if workers:
        data = DataLoader(
            rows(),
            batch_sampler=Buckets(),
            collate_fn=ragged,
            num_workers=workers,
            persistent_workers=True,
        )
    for _ in range(2):
        assert [number for _, number in counted(data)] == [2, 4, 3, 2]


def test_recording_changes_nothing_that_is_drawn():
    orders = []
    for record in (False, True):
        torch.manual_seed(3)
        data = DataLoader(TensorDataset(torch.arange(N)), 4, shuffle=True)
        batches = (batch for batch, _ in counted(data)) if record else data
        orders.append([x.tolist() for (x,) in batches] + [float(torch.rand(1))])
    assert orders[0] == orders[1]


def test_a_sampler_that_gives_lists_without_a_batch_size():
    x = torch.randn(N, 4)
    lists = BatchSampler(SequentialSampler(x), 4, drop_last=False)
    data = DataLoader(
        TensorDataset(x), sampler=lists, batch_size=None, collate_fn=lambda rows: (rows[0].T,)
    )
    assert [number for _, number in counted(data)] == [4, 4, 3]


def test_of_several_loaders_the_first_counts():
    loaders = {"graphs": DataLoader(rows(), 4, collate_fn=ragged), "more": loader(40, 5)}
    numbers = [number for _, number in counted(CombinedLoader(loaders, "max_size_cycle"))]
    assert numbers == [4, 4, 3, 4, 4, 3, 4, 4]


class Stream(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def test_of_a_stream_the_size_of_a_full_batch_tells_the_place():
    assert [
        number for _, number in counted(DataLoader(Stream(rows()), 4, collate_fn=time_first))
    ] == [4, 4, 3]


def test_of_an_own_loader_what_is_as_large_as_the_batch_size_counts_later_ones_too():
    own = [time_first(rows()[i : i + 4]) for i in range(0, N, 4)]
    assert [number for _, number in counted(own, Sizes(4))] == [4, 4, 3]
    lists = [detection(rows()[i : i + 4])[:1] for i in range(0, N, 4)]
    assert [number for _, number in counted(lists, Sizes(4))] == [4, 4, 3]


def test_what_nobody_can_know_is_not_guessed():
    nodes = {"x": torch.ones(9, 4), "edges": torch.ones(2, 30)}
    assert Sizes(5).examples_in(nodes) is None
    assert Sizes(5).examples_in((torch.ones(16, 3), torch.ones(16))) == 16
    assert Sizes().examples_in(nodes) == 9


def test_one_text_an_example_follows_its_example():
    batch = (torch.arange(4), ("a", "b", "c", "d"))
    assert cut(batch, slice(1, 3))[1] == ("b", "c")
    size = {"x": torch.arange(2), "size": (224, 224), "ids": [7, 8]}
    assert cut(size, slice(1, 2))["size"] == (224, 224) and cut(size, slice(1, 2))["ids"] == [8]
    values, texts = cut(batch, torch.tensor([3, 0]))
    assert (values.tolist(), texts) == ([3, 0], ("d", "a"))


@pytest.mark.parametrize(
    "entries",
    [
        (3, 1, 2, 5, 4),
        tuple(np.arange(5)),
        (None, 1.5, None, 2.0, None),
        tuple(torch.arange(5)),
        list(torch.arange(5)),
    ],
    ids=["numbers", "numpy", "none", "tensors", "list"],
)
def test_a_list_that_stays_whole_with_an_entry_for_each_example_prevents_a_cut(entries):
    tensors = [torch.ones(5, 3), torch.ones(5)]
    assert not can_be_cut((*tensors, entries), 5)
    assert can_be_cut((*tensors, entries[:3]), 5)
    assert not can_be_cut((tensors[1][:2], [("q1", "q2"), ("a1", "a2")]), 2)
    assert can_be_cut((tensors[1][:3], [("q1", "q2", "q3"), ("a1", "a2", "a3")]), 3)
    assert can_be_cut(tuple(torch.ones(2, 3) for _ in range(2)), 2)


class Holder:
    """A batch of a user's class."""

    def __init__(self, content):
        self.content = content


def test_an_object_that_holds_tensors_prevents_a_cut():
    labels = torch.ones(4)
    assert not can_be_cut((Holder(torch.ones(4, 3)), labels), 4)
    assert not can_be_cut((Holder({"images": Holder(torch.ones(4, 3))}), labels), 4)
    named = Holder("a name")
    named.content = named
    assert can_be_cut((named, labels), 4)


def test_batches_whose_tensors_differ_in_length_are_not_cut():
    assert can_be_cut((torch.ones(4, 2), torch.ones(4)), 4)
    for collate in KINDS:
        assert not can_be_cut(collate(rows(4)), 4)
    with pytest.raises(UserError) as caught:
        fit(
            Plain(),
            DataLoader(rows(), 4, collate_fn=ragged),
            callbacks=[NoiseScaleCallback()],
            max_steps=1,
        )
    assert caught.value.key == "NoiseScaleCallback"


class Ragged(LightningModule):
    """A linear regression on ragged batches; the loss is the mean over examples."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))

    def training_step(self, batch, batch_idx):
        x, ends = batch
        outputs = torch.tensor_split(self.network(x), ends[1:-1])
        return torch.stack([output.sum().square() for output in outputs]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def ragged_loader(**options) -> DataLoader:
    return DataLoader(rows(), 4, collate_fn=ragged, **options)


def test_masks_weigh_batches_by_their_examples():
    module, pruning = Ragged(), PruningCallback(0.5, batch_size=4)
    fit(Ragged(), ragged_loader(), callbacks=[pruning], max_steps=1)
    sums = [torch.zeros_like(p) for p in module.parameters()]
    for start in range(0, N, 4):
        items = rows()[start : start + 4]
        loss = module.training_step(ragged(items), 0) * len(items) / N
        for total, gradient in zip(
            sums, torch.autograd.grad(loss, list(module.parameters())), strict=True
        ):
            total += gradient
    for (name, parameter), total in zip(module.named_parameters(), sums, strict=True):
        expected = (parameter * total).detach().abs()
        scores = pruning.scores[name]
        assert scores / scores.max() == pytest.approx(expected / expected.max(), rel=1e-4)


class Numbers(Callback):
    """Keeps the examples of each training batch."""

    def __init__(self):
        self.numbers, self.full = [], 0

    def setup(self, trainer, pl_module, stage):
        record_batches(trainer)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.full = full_batch_size(trainer, batch)
        self.numbers.append(examples_of(trainer, batch))


class Unsized(Buckets):
    __len__ = None


@pytest.mark.parametrize("sampler", [Buckets, Unsized])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_current_batch_is_counted_where_batches_are_fetched_ahead(sampler, workers):
    numbers = Numbers()
    data = DataLoader(rows(), batch_sampler=sampler(), collate_fn=ragged, num_workers=workers)
    fit(Ragged(), data, callbacks=[numbers], max_steps=7)
    assert numbers.numbers == [2, 4, 3, 2, 2, 4, 3]


def test_a_short_first_batch_is_a_short_step_and_no_error():
    examples = ExamplesCallback(4)
    data = DataLoader(rows(), batch_sampler=Buckets(), collate_fn=ragged)
    fit(Ragged(), data, callbacks=[examples], max_steps=6)
    assert examples.flags == {"short_steps": 4}


@pytest.mark.parametrize("batch_size", [3, 8])
def test_a_key_that_does_not_reach_the_loader_is_refused(batch_size):
    with pytest.raises(ConfigError) as caught:
        fit(Ragged(), ragged_loader(), callbacks=[ExamplesCallback(batch_size)], max_steps=9)
    assert caught.value.key == "study.batch_size_key" and "4 examples" in caught.value.allowed


class Own:
    """A loader of a class of its own."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def test_steps_whose_examples_nobody_knows_are_noted():
    own = Own([{"x": torch.ones(9, 4), "edges": torch.ones(2, 30)}] * 3)
    examples, module = ExamplesCallback(5), Ragged()
    module.training_step = lambda batch, batch_idx: module.network(batch["x"]).mean()
    fit(module, own, callbacks=[examples], max_steps=4)
    assert examples.flags == {"uncounted_steps": 4} and examples.volume == 96


def test_a_short_first_batch_does_not_scale_adam():
    numbers = Numbers()
    data = loader(10, 4, shuffle=False)
    fit(Plain(), data, callbacks=[numbers], max_steps=3)
    assert (numbers.numbers, numbers.full) == ([4, 4, 2], 4)


def shared() -> dict:
    examples = ExamplesCallback(4)
    fit(Plain(), loader(10, 4), callbacks=[examples], max_steps=6, **trainer_arguments(QUIET))
    return examples.flags


def graphs_on_ranks() -> None:
    fit(Ragged(), ragged_loader(), max_steps=2, **trainer_arguments(QUIET))


def test_ranks_count_the_steps_of_one_process_and_refuse_what_cannot_be_cut():
    assert same_on_ranks(2, shared) == shared() == {"short_steps": 2}
    for error in on_ranks(2, graphs_on_ranks):
        assert isinstance(error, ConfigError) and error.key == "trainer.strategy"


def counts_of_rank():
    shards = ShardLoader(loader(9, 4))
    parts = [len(batch[0]) for batch in shards]
    return parts, shards.counts


def test_a_loader_of_ranks_tells_the_whole_batch_and_its_part():
    parts = 0
    for of_rank, counts in on_ranks(2, counts_of_rank):
        assert [part for _, part in counts] == of_rank
        parts += sum(of_rank)
    assert parts == 9
