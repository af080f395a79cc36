"""Worker processes that do what they are told, as many at a time as a study's workers."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from lit_dps.parallel.process import SWITCH, prepare_process

READY = 120  # seconds that processes have to import what they need

Apply = Callable[[Callable[..., Any], Iterable[tuple]], list]


@contextmanager
def pool(workers: int, threads: int, keep: bool = True) -> Iterator[Apply]:
    """So many processes, spawned as a study's are, each with so many threads of torch.

    Args:
        workers: How many.
        threads: Of each.
        keep: Whether they keep the memory that they free, as a study's do.

    Yields:
        A function that applies another one to tuples of arguments, `workers` at a time, and returns
        the results in order.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(workers)
    with ProcessPoolExecutor(workers, context, _begin, (barrier, threads, keep)) as executor:

        def apply(function: Callable[..., Any], arguments: Iterable[tuple]) -> list:
            return [
                future.result()
                for future in [executor.submit(function, *each) for each in arguments]
            ]

        yield apply


def _begin(barrier, threads: int, keep: bool) -> None:
    if not keep:
        os.environ[SWITCH] = "0"
    prepare_process()
    torch.set_num_threads(threads)
    barrier.wait(READY)  # so that no trial runs alone at first
