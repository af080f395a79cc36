"""Data parallelism: several processes, the ranks, train one network, each on its part of every
batch."""
