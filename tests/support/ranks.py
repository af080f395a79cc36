"""Runs a function as several ranks: forked processes, which start in no time."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lit_dps.parallel import launch

if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def on_ranks(world: int, call: Callable[..., Any], *args: Any, timeout: float = 500) -> list[Any]:
    """What `call(*args)` returns on each of `world` ranks; an exception is returned as such."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(Path(folder), rank, world, call, args))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(timeout)
                assert process.exitcode is not None, "a rank hangs"
        finally:
            for process in processes:
                process.kill()
        return [
            _answer(Path(folder), rank, process.exitcode) for rank, process in enumerate(processes)
        ]


def same_on_ranks(world: int, call: Callable[..., Any], *args: Any) -> Any:
    """The same, where all ranks have to return the same without an error."""
    first, *others = on_ranks(world, call, *args)
    for answer in (first, *others):
        assert not isinstance(answer, BaseException), answer
        assert repr(answer) == repr(first)
    return first


def _rank(folder: Path, rank: int, world: int, call: Callable[..., Any], args: tuple) -> None:
    try:
        with launch.joined(dist.FileStore(str(folder / "store"), world), rank, world):
            answer = call(*args)
    except Exception as error:
        traceback.print_exc()
        answer = error
    (folder / f"part-{rank}").write_bytes(pickle.dumps(answer))
    (folder / f"part-{rank}").rename(folder / str(rank))


def _answer(folder: Path, rank: int, code: int | None) -> Any:
    file = folder / str(rank)
    return pickle.loads(file.read_bytes()) if file.exists() else SystemExit(code)
