"""States of random number generators, wherever they are kept."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lit_dps.data.loaders import EndlessLoader
from lit_dps.training.checkpoint_callback import ResumableLoader
from lit_dps.training.hidden_state import capture_rng_state, generators_in, restore_rng_state
from tests.support.errors import raises_about
from tests.support.tiny import points


def keeper() -> SimpleNamespace:
    """An object with a generator of each kind, the last one deep inside."""
    inside = SimpleNamespace(parts=[{"rng": np.random.RandomState(4)}])
    return SimpleNamespace(
        torch=torch.Generator().manual_seed(1),
        numpy=np.random.default_rng(2),
        python=random.Random(3),
        inside=inside,
    )


def draws(kept: SimpleNamespace) -> list[float]:
    """One number of every generator; of the normal ones two make a pair, of which one waits."""
    return [
        torch.rand(()).item(),
        np.random.normal(),
        random.gauss(0, 1),
        torch.rand((), generator=kept.torch).item(),
        kept.numpy.normal(),
        kept.python.gauss(0, 1),
        kept.inside.parts[0]["rng"].normal(),
    ]


def test_all_draw_again_what_they_drew_also_after_a_file(tmp_path):
    kept = keeper()
    first = draws(kept)
    torch.save(capture_rng_state(kept), tmp_path / "state")
    after = [draws(kept) for _ in range(3)]
    assert after[0] != first and len({x for row in after for x in row}) == 21
    other = keeper()
    restore_rng_state(torch.load(tmp_path / "state", weights_only=True), other)
    assert [draws(other) for _ in range(3)] == after


class OnDevice(torch.Tensor):
    """A state that was read onto a GPU: torch takes those of the CPU alone."""

    @staticmethod
    def of(state: torch.Tensor) -> OnDevice:
        return torch.empty_like(state, device="meta").as_subclass(OnDevice).holding(state)

    def holding(self, state: torch.Tensor) -> OnDevice:
        self.held = state
        return self

    def cpu(self) -> torch.Tensor:
        return self.held


def test_states_that_were_read_onto_a_gpu():
    kept = keeper()
    state = capture_rng_state(kept)
    numbers = draws(kept)
    moved = [
        OnDevice.of(each) if isinstance(each, torch.Tensor) else each for each in state["kept"]
    ]
    with pytest.raises((TypeError, RuntimeError)):
        torch.set_rng_state(OnDevice.of(state["torch"]))
    restore_rng_state({**state, "torch": OnDevice.of(state["torch"]), "kept": moved}, kept)
    assert draws(kept) == numbers


@pytest.mark.parametrize(
    "kind", [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64]
)
def test_every_bit_generator_of_numpy(tmp_path, kind):
    kept = [np.random.Generator(kind(5))]
    torch.save(capture_rng_state(kept), tmp_path / "state")
    numbers = kept[0].random(5).tolist()
    restore_rng_state(torch.load(tmp_path / "state", weights_only=True), kept)
    assert kept[0].random(5).tolist() == numbers


def test_owners_that_are_not_alike_are_refused():
    state = capture_rng_state(keeper())
    with raises_about(ValueError, "argument"):
        restore_rng_state(state)


def test_each_is_found_once_and_examples_are_not_searched():
    generator = random.Random(0)
    around = SimpleNamespace(a=generator, b=[generator], examples=[random.Random(1)] * 2000)
    around.self = around
    assert generators_in(around, generator) == [generator]
    assert generators_in(random.SystemRandom(), torch.zeros(3), None, 4) == []


class Stream(IterableDataset):
    def __iter__(self):
        return iter(points())


class Stateful(DataLoader):
    def state_dict(self):
        return {}


def test_loaders_whose_place_can_be_found_again():
    served = [
        EndlessLoader(lambda: iter([])),
        DataLoader(points(), 4, shuffle=True),
        DataLoader(points(), 4, num_workers=1),
    ]
    others = [
        DataLoader(Stream(), 4),
        DataLoader(points(), 4, num_workers=1, persistent_workers=True),
        Stateful(points(), 4),
        [DataLoader(points(), 4)],
        iter([]),
    ]
    assert [ResumableLoader.supports(loader) for loader in served + others] == [True] * 3 + [
        False
    ] * 5


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_a_position_in_a_shuffled_pass(taken):
    def loader(position=None):
        return ResumableLoader(DataLoader(points(20), 4, shuffle=True), position=position)

    torch.manual_seed(0)
    whole = loader()
    iter(whole)
    torch.rand(3)  # between the loader's begin and its first batch
    positions, batches = [], []
    whole.between = lambda: positions.append(whole.position())
    for batch, _, _ in whole:
        batches.append(batch[0])
        torch.rand(1)
    rest = loader(positions[taken])
    torch.manual_seed(99)
    found = [batch[0] for batch, _, _ in rest]
    assert len(found) == 5 - taken
    assert all(torch.equal(a, b) for a, b in zip(found, batches[taken:], strict=True))


def test_a_position_beyond_the_data_is_refused():
    loader = ResumableLoader(DataLoader(points(20), 4))
    iter(loader)
    next(loader)
    position = {**loader.position(), "taken": 6}
    with raises_about(ValueError, 6):
        next(iter(ResumableLoader(DataLoader(points(20), 4), position=position)))
