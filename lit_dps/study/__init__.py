"""Runs a study: checks it, starts workers and ranks, and shows its progress.

Read in this order: `setup` (the configuration of a study), `preflight` (its checks), `run` (from
the configuration to the result), `run_cells` and `workers` (how its trials are trained).
`probe_run` has the short runs beside a study, which time or check something.
"""
