"""Tracking: shows studies in MLflow.

A study runs without MLflow, and its MLflow runs can be made again from storage. Read in this order:
`sync` (MlflowSync logs a study while it runs, or afterwards), `trial_run` and `outcome` (what is
logged of a trial, of cells and of the study), `runs` (finds and writes runs), `client` (opens
MLflow), `pages` (addresses and views). This is the only room that imports MLflow.
"""
