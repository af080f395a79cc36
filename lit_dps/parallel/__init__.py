"""Processes that train: their start, their GPUs, and data parallelism, where several processes, the
ranks, train one network, each on its part of every batch."""
