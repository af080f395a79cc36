"""Ranks: how a batch is divided, what ranks tell each other, and how the death of one is found."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from lit_dps.core.errors import StorageError
from lit_dps.parallel import ddp, launch, ranks
from lit_dps.parallel.ddp import SharedBatchDDP
from lit_dps.parallel.process import Interrupted, StopRequest
from lit_dps.study.workers import make_stop_check
from tests.support.errors import refuses
from tests.support.ranks import on_ranks, same_on_ranks
from tests.support.texts import numbers_in


@pytest.mark.parametrize(("n", "world"), [(2, 4), (5, 4), (7, 2), (16, 3), (1, 2), (0, 2)])
@pytest.mark.parametrize("turn", [0, 1, 5])
def test_parts_are_all_examples_once_and_of_nearly_one_size(monkeypatch, n, world, turn):
    monkeypatch.setattr(ranks, "world", lambda: world)
    parts = []
    for rank in range(world):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        parts.append(list(range(n))[ranks.shard(n, turn)])
    assert sorted(sum(parts, [])) == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_process_alone_has_all_of_it():
    assert (ranks.rank(), ranks.world(), ranks.shard(5)) == (0, 1, slice(0, 5))
    assert ranks.broadcast(3) == 3 and ranks.all_gather(3) == [3]
    tensor = torch.ones(2)
    assert ranks.all_reduce_sum(tensor) is tensor


def _talk():
    own = ranks.rank()
    total = ranks.all_reduce_sum(torch.tensor([own + 1.0, 0.5]))
    return (
        total.tolist(),
        ranks.broadcast({"of": own}),
        ranks.all_gather(own),
        ranks.on_rank_zero(lambda: f"by {own}"),
    )


def test_ranks_hear_the_sum_the_first_and_everyone():
    assert same_on_ranks(3, _talk) == ([6.0, 1.5], {"of": 0}, [0, 1, 2], "by 0")


def _first_fails():
    def ask():
        assert ranks.rank() == 0
        raise StorageError("full")

    ranks.on_rank_zero(ask)


def test_an_error_of_the_first_is_everyones():
    answers = on_ranks(2, _first_fails)
    assert [(type(a), str(a)) for a in answers] == [(StorageError, "full")] * 2


def _signal_to_the_last():
    stop = StopRequest()
    check = make_stop_check(stop)
    check()
    if ranks.rank() == ranks.world() - 1:
        stop.signal = "SIGTERM"
    try:
        check()
    except Interrupted as error:
        return str(error)


def test_all_leave_at_the_check_when_one_was_asked_to():
    assert on_ranks(3, _signal_to_the_last) == ["another process", "another process", "SIGTERM"]


def _last_dies():
    ranks.all_reduce_sum(torch.zeros(1))
    if ranks.rank() == 1:
        os._exit(9)
    ranks.all_reduce_sum(torch.zeros(1))


def test_a_dead_rank_is_an_error_on_the_others():
    begin = time.monotonic()
    first, _ = on_ranks(2, _last_dies)
    assert isinstance(first, ranks.RankLost)
    assert str(first).startswith("rank 0: ") and numbers_in(str(first))[:2] == [0, 2]
    assert time.monotonic() - begin < 30


def _own_error():
    raise RuntimeError("unknown")


def test_another_error_stays_what_it_is():
    assert [(type(a), str(a)) for a in on_ranks(2, _own_error)] == [(RuntimeError, "unknown")] * 2


class Memory:
    """A store in a dict."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)


@pytest.fixture
def died(monkeypatch):
    codes = []
    monkeypatch.setattr(launch, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(launch, "MAX_MISSED_BEATS", 10)
    monkeypatch.setattr(launch.os, "_exit", codes.append)
    return codes


def test_a_rank_without_pulse_ends_the_process(died, capsys):
    store = Memory()
    one, other = launch.Heartbeat(store, 0, 2), launch.Heartbeat(store, 1, 2)
    one.start(), other.start()
    time.sleep(0.5)
    assert died == []
    other.stop()
    deadline = time.monotonic() + 10
    while not died and time.monotonic() < deadline:
        time.sleep(0.01)
    one.stop()
    assert died[0] == 2
    assert "rank 0: rank 1 " in capsys.readouterr().err


def test_a_lost_store_ends_the_process(died, capsys):
    class Gone(Memory):
        def set(self, key, value):
            raise dist.DistNetworkError("Broken pipe")

    thread = launch.Heartbeat(Gone(), 1, 2)
    thread.start()
    thread.join(10)
    assert died == [2]
    assert "rank 1: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("trainer", "asked"),
    [
        ({}, 1),
        ({"devices": "auto", "strategy": "auto"}, 1),
        ({"accelerator": "cpu", "devices": 3}, 3),
        ({"accelerator": "cpu", "devices": "2", "strategy": "ddp"}, 2),
        ({"accelerator": "cpu", "strategy": "ddp"}, 1),
    ],
)
def test_ranks_that_a_configuration_asks_for(trainer, asked, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert ddp.ranks_asked(trainer) == asked


@pytest.mark.parametrize(
    ("trainer", "refused"),
    [
        ({"devices": 2, "strategy": "fsdp"}, "strategy"),
        ({"devices": 2, "strategy": "ddp_spawn"}, "strategy"),
        ({"devices": 2, "accelerator": "tpu"}, "accelerator"),
        ({"devices": 0}, "devices"),
        ({"devices": "two"}, "devices"),
        ({"num_nodes": 2}, "num_nodes"),
    ],
)
def test_values_that_ranks_cannot_have_are_refused(trainer, refused, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with refuses(f"trainer.{refused}", trainer[refused]):
        ddp.ranks_asked({"accelerator": "cpu", **trainer})


def test_torchrun_says_how_many_ranks_there_are(monkeypatch):
    for name, value in {"RANK": 2, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert ranks.follows_torchrun()
    for serves in ({}, {"devices": 2}, {"devices": 2, "num_nodes": 2, "strategy": "ddp"}):
        assert ddp.ranks_asked({"accelerator": "cpu", **serves}) == 4
    for key, value in {"devices": 4, "num_nodes": 4, "strategy": "fsdp"}.items():
        with refuses(f"trainer.{key}", value):
            ddp.ranks_asked({"accelerator": "cpu", key: value})


def test_one_process_trains_on_one_device_whatever_is_asked_for():
    one = ddp.trainer_arguments(
        {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "num_nodes": 2, "max_steps": 5}
    )
    assert (one["devices"], one["strategy"], one["num_nodes"], one["max_steps"]) == (
        1,
        "auto",
        1,
        5,
    )
    assert not ddp.trainer_arguments(one)["plugins"][1:]


def _arguments():
    found = ddp.trainer_arguments(
        {"accelerator": "cpu", "strategy": "ddp_find_unused_parameters_true"}
    )
    strategy = found.pop("strategy")
    assert isinstance(strategy, SharedBatchDDP) and strategy._ddp_kwargs == {
        "find_unused_parameters": True
    }
    return found


def test_a_group_trains_by_our_strategy():
    found = same_on_ranks(2, _arguments)
    assert found == {
        "accelerator": "cpu",
        "devices": 2,
        "num_nodes": 1,
        "use_distributed_sampler": False,
        "plugins": [],
    }
