"""The noise scale of a study whose parts were run elsewhere."""

from __future__ import annotations

import dataclasses

from lit_dps.core.noise_scale import NoiseScale
from lit_dps.storage.read import read_study
from lit_dps.storage.run_records import store_noise_scale
from tests.unit.storage.test_merge import A, merged, ran, written

NOISE = NoiseScale(1.0, 0.1, 60.0, 1.0, 50.0, 80.0, readings=64, batch_size=64)


def test_the_noise_scale_is_that_of_a_study_run_at_once(tmp_path):
    urls = [f"sqlite:///{tmp_path}/{i}.db" for i in range(4)]
    for url, given in zip(urls[1:], ((16, 64), (64, 64), (256, 99)), strict=True):
        written(url, {A: [ran("incomplete", 64)]})
        batch_size, readings = given
        store_noise_scale(
            url, "fake", dataclasses.replace(NOISE, batch_size=batch_size, readings=readings)
        )
    known = {url: read_study(url, "fake").noise for url in urls[1:]}
    merged(urls[0], urls[1])  # into a storage that is new
    assert read_study(urls[0], "fake").noise == known[urls[1]]
    merged(
        urls[0], urls[3], urls[2]
    )  # 16 is too few examples, and of the others 64 is the smallest
    merged(urls[0], urls[1])
    assert read_study(urls[0], "fake").noise == known[urls[2]]
    store_noise_scale(urls[1], "fake", more := dataclasses.replace(NOISE, readings=65))
    merged(urls[0], urls[1])
    assert read_study(urls[0], "fake").noise == more
