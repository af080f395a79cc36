"""Tracking: shows studies in MLflow.

A study runs without MLflow, and its MLflow runs can be made again from storage. Read in this order:
`sync` (logs a study while it runs, or afterwards), `tracker` (finds and writes runs), `trial_run`
(what is logged of a trial), `client` (opens MLflow), `pages` (addresses and views). This is the
only room that imports MLflow.
"""
