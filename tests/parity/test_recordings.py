"""The recordings that come with the tests say what those that they were made of do, where these are
on the machine."""

from __future__ import annotations

import numpy as np
import pytest

from tests.parity.authors import RECORDINGS
from tests.parity.condense import GRID, WANTED, digest, restored


@pytest.mark.parametrize("name", WANTED)
def test_condensed_recordings_hold_all_that_is_compared(name):
    arrays = restored(name)
    if name.startswith("data-order"):
        assert {array.nbytes for array in arrays.values()} == {32}
        return
    assert {key.partition("_")[0] for key in arrays} == {
        prefix.partition("_")[0] for prefix in WANTED[name]
    }
    assert all(np.isfinite(array).all() for array in arrays.values())


@pytest.mark.skipif(
    not RECORDINGS.is_dir(),
    reason="the recordings in full are not on this machine (LIT_DPS_SHARED)",
)
@pytest.mark.parametrize("name", WANTED)
def test_condensed_recordings_are_those_in_full(name):
    with np.load(RECORDINGS / f"{name}.npz") as stored:
        whole = dict(stored)
    scale = max(
        (np.abs(array).max() for key, array in whole.items() if key.startswith("snip_")),
        default=1.0,
    )
    for key, array in restored(name).items():
        if name.startswith("data-order"):
            np.testing.assert_array_equal(array, digest(whole[key]))
        elif key.startswith(("snip_", "w1_")):
            unit = scale if key.startswith("snip_") else 1.0
            np.testing.assert_allclose(array, whole[key], rtol=0, atol=0.51 * GRID * unit)
        else:
            np.testing.assert_array_equal(array, whole[key])
