"""Which indices make the batch of a step."""

from itertools import islice

import numpy as np
import pytest
import torch

from lit_dps.core.errors import DataError
from lit_dps.data.loaders import AuthorsOrder, batches, epochs_of_file, seeded_epochs
from tests.support.errors import refuses


def take(iterator, n):
    return list(islice(iterator, n))


def test_the_authors_order_is_one_random_state_that_shuffles_split_pruning_epoch_and_epochs():
    state, expected = np.random.RandomState(0), []
    for n in (50, 45, 45, 45, 45):
        ids = np.arange(n)
        state.shuffle(ids)
        expected.append(ids)
    order = AuthorsOrder(50, 0.1)
    np.testing.assert_array_equal(order.val_ids, expected[0][:5])
    np.testing.assert_array_equal(order.train_ids, expected[0][5:])
    np.testing.assert_array_equal(order.pruning_epoch, expected[1])
    np.testing.assert_array_equal(take(order.epochs(), 3), expected[2:])


def test_the_authors_epochs_begin_anew_at_every_call_and_do_not_touch_the_global_state():
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    order = AuthorsOrder(30)
    first = take(order.epochs(), 4)
    np.testing.assert_array_equal(first, take(order.epochs(), 4))
    assert not np.array_equal(first[0], first[1])
    np.testing.assert_array_equal(np.random.get_state()[1], before)


def test_seeded_epochs_are_permutations_from_a_random_state_of_that_seed():
    state, expected = np.random.RandomState(4_000_000_000), []  # derived seeds use all 32 bits
    for _ in range(3):
        ids = np.arange(11)
        state.shuffle(ids)
        expected.append(ids)
    np.testing.assert_array_equal(take(seeded_epochs(11, 4_000_000_000), 3), expected)
    assert not np.array_equal(expected[0], take(seeded_epochs(11, 1), 1)[0])


@pytest.mark.parametrize("batch_size", [1, 3, 4, 6, 7, 12, 13])
def test_batches_are_full_and_run_on_across_the_ends_of_epochs(batch_size):
    n = 13
    stream = np.concatenate(take(seeded_epochs(n, 2), 12))
    found = take(batches(seeded_epochs(n, 2), batch_size), len(stream) // batch_size)
    assert all(batch.dtype is torch.int64 and batch.shape == (batch_size,) for batch in found)
    np.testing.assert_array_equal(
        torch.cat(found).numpy(), stream[: len(stream) // batch_size * batch_size]
    )


def test_a_batch_size_of_the_split_takes_one_epoch_a_batch():
    found = take(batches(seeded_epochs(9, 0), 9), 4)
    np.testing.assert_array_equal(torch.stack(found).numpy(), take(seeded_epochs(9, 0), 4))


def test_batches_already_handed_out_do_not_change():
    found, copies = [], []
    for batch in islice(batches(seeded_epochs(5, 0), 3), 20):
        found.append(batch)
        copies.append(batch.clone())
    assert all(torch.equal(a, b) for a, b in zip(found, copies, strict=True))


ROWS = np.array([[2, 0, 1, 3], [3, 2, 1, 0]])


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.uint64, np.float64])
def test_a_given_order_is_repeated_row_by_row_as_int64_indices(tmp_path, dtype):
    np.save(tmp_path / "order.npy", ROWS.astype(dtype))
    found = take(batches(epochs_of_file(tmp_path / "order.npy", 4), 2), 6)
    assert torch.cat(found).tolist() == [2, 0, 1, 3, 3, 2, 1, 0, 2, 0, 1, 3]
    assert all(
        batch.dtype is torch.int64 for batch in found
    )  # a tensor of another type is no index


def test_one_row_is_one_epoch_over_and_over(tmp_path):
    np.save(tmp_path / "order.npy", ROWS[0])
    np.testing.assert_array_equal(take(epochs_of_file(tmp_path / "order.npy", 4), 3), [ROWS[0]] * 3)


@pytest.mark.parametrize(
    "rows",
    [
        [[0, 1, 2]],  # too short
        [[0, 1, 2, 3, 4]],  # too long
        [[0, 1, 2, 2]],  # twice
        [[1, 2, 3, 4]],  # from 1
        [[0, 1, 2, 3], [0, 1, 2, -1]],  # only one row wrong
        np.zeros((2, 2, 4)),
        np.empty((0, 4)),  # no epoch at all: it would search for one for ever
    ],
)
def test_rows_that_are_no_permutations_are_refused(tmp_path, rows):
    path = tmp_path / "order.npy"
    np.save(path, np.asarray(rows))
    with refuses("data.order", str(path)) as refused:
        epochs_of_file(path, 4)
    assert "range(4)" in refused.value.allowed


class Bomb:
    fired = False

    def __reduce__(self):
        return setattr, (Bomb, "fired", True)


def test_a_pickled_order_is_refused_and_not_opened(tmp_path):
    path = tmp_path / "order.npy"
    np.save(path, np.array([Bomb()], dtype=object), allow_pickle=True)
    with refuses("data.order", str(path), error=DataError):
        epochs_of_file(path, 1)
    assert not Bomb.fired


@pytest.mark.parametrize(
    "content", [None, b"", b"no npy", b"\x93NUMPY\x01\x00"], ids=["missing", "empty", "text", "cut"]
)
def test_an_order_that_cannot_be_read_is_a_data_error(tmp_path, content):
    path = tmp_path / "order.npy"
    if content is not None:
        path.write_bytes(content)
    with refuses("data.order", str(path), error=DataError):
        epochs_of_file(path, 4)
