"""Worker processes that do what they are told, as many at a time as a study's workers."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from lit_dps.study.group import prepare_process

READY = 120  # seconds that processes have to import what they need

Apply = Callable[[Callable[..., Any], Iterable[tuple]], list]


@contextmanager
def pool(workers: int, threads: int) -> Iterator[Apply]:
    """So many processes, spawned as a study's are, each with so many threads of torch.

    Yields:
        A function that applies another one to tuples of arguments, `workers` at a time, and returns the results in
        order.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(workers)
    with ProcessPoolExecutor(workers, context, _begin, (barrier, threads)) as executor:

        def apply(function: Callable[..., Any], arguments: Iterable[tuple]) -> list:
            return [future.result() for future in [executor.submit(function, *each) for each in arguments]]

        yield apply


def _begin(barrier, threads: int) -> None:
    prepare_process()
    torch.set_num_threads(threads)
    barrier.wait(READY)  # so that no trial runs alone at first
