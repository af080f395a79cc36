"""Ranks come together before they begin and before they leave, and connect once more if one could
not."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lit_dps.parallel import launch, ranks
from tests.support.ranks import on_ranks, same_on_ranks

CONNECT, LEAVE = dist.init_process_group, dist.destroy_process_group
BROKEN = "Gloo connectFullMesh failed with [pair.cc:561] Connection closed by peer [127.0.0.1]:1"


def _sum() -> float:
    return ranks.all_reduce_sum(torch.tensor(ranks.rank() + 1.0)).item()


@pytest.mark.parametrize("failures", [1, 2])
def test_a_connection_that_fails_is_tried_once_more_by_all(monkeypatch, failures):
    tries = []

    def connect(*args, rank, **kw):
        tries.append(rank)
        CONNECT(*args, rank=rank, **kw)
        if rank == 1 and len(tries) <= failures:
            LEAVE()
            raise RuntimeError(BROKEN)

    monkeypatch.setattr(dist, "init_process_group", connect)
    # On a busy machine a rank may wait for one that is gone.
    monkeypatch.setattr(launch, "CONNECT_TIMEOUT", timedelta(seconds=20))
    if failures == 1:
        assert same_on_ranks(3, _sum) == 6.0
    else:
        assert [type(answer) for answer in on_ranks(3, _sum)] == [ranks.RankLost] * 3


def test_who_waits_for_a_rank_that_could_not_connect_tries_again_with_all(monkeypatch):
    tries = []

    def connect(*args, rank, **kw):
        tries.append(rank)
        if rank == 1 and len(tries) == 1:
            kw |= {
                "store": dist.PrefixStore("nowhere", kw["store"]),
                "timeout": timedelta(seconds=0.2),
            }
        CONNECT(*args, rank=rank, **kw)  # that once it finds nobody, and the others do not find it

    monkeypatch.setattr(dist, "init_process_group", connect)
    monkeypatch.setattr(launch, "CONNECT_TIMEOUT", timedelta(seconds=2))
    begin = time.monotonic()
    assert same_on_ranks(3, _sum) == 6.0
    assert time.monotonic() - begin >= 2, "two have waited"


@pytest.mark.parametrize("reason", [BROKEN, "Wait timeout", "Socket Timeout"])
def test_ranks_that_never_connect_are_lost(monkeypatch, reason):
    def connect(*args, **kw):
        raise RuntimeError(reason)

    monkeypatch.setattr(dist, "init_process_group", connect)
    assert [type(answer) for answer in on_ranks(2, _sum)] == [ranks.RankLost] * 2


def _default_timeout():
    return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout


def test_a_collective_waits_longer_than_connecting_does():
    assert same_on_ranks(2, _default_timeout) == launch.TIMEOUT > launch.CONNECT_TIMEOUT


def test_an_error_of_the_configuration_is_not_taken_for_a_lost_rank(monkeypatch):
    def connect(*args, **kw):
        raise RuntimeError("unknown")

    monkeypatch.setattr(dist, "init_process_group", connect)
    assert [str(answer) for answer in on_ranks(2, _sum)] == ["unknown"] * 2


def test_no_rank_begins_before_all_are_connected(monkeypatch, tmp_path):
    def connect(*args, rank, **kw):
        CONNECT(*args, rank=rank, **kw)
        if rank == 1:
            time.sleep(0.5)
            (tmp_path / "connected").touch()

    monkeypatch.setattr(dist, "init_process_group", connect)
    assert same_on_ranks(2, (tmp_path / "connected").exists)


def _late(done) -> None:
    if ranks.rank() == 1:
        time.sleep(0.5)
        done.touch()


def test_no_rank_leaves_before_all_are_done(monkeypatch, tmp_path):
    def leave():
        assert (tmp_path / "done").exists()
        LEAVE()

    monkeypatch.setattr(dist, "destroy_process_group", leave)
    assert on_ranks(2, _late, tmp_path / "done") == [None, None]


def _first_has_an_error() -> None:
    if ranks.rank() == 0:
        raise ValueError("of the first alone")


def test_a_rank_with_an_error_is_not_waited_for():
    begin = time.monotonic()
    first, other = on_ranks(2, _first_has_an_error)
    assert isinstance(first, ValueError) and other is None
    assert time.monotonic() - begin < launch.LEAVE_SECONDS / 2


def _first_is_late(done) -> None:
    if ranks.rank() == 0:
        time.sleep(2)
        done.touch()


def test_no_rank_waits_for_ever(monkeypatch, tmp_path):
    def leave():
        assert (tmp_path / "done").exists() is (ranks.rank() == 0)
        LEAVE()

    monkeypatch.setattr(launch, "LEAVE_SECONDS", 0.1)
    monkeypatch.setattr(dist, "destroy_process_group", leave)
    assert on_ranks(2, _first_is_late, tmp_path / "done") == [None, None]
