"""Tracking: shows studies in MLflow.

A study runs without MLflow, and its MLflow runs can be made again from storage. Read in this order:
`sync` (MlflowSync logs a study while it runs, or afterwards), `description` (what is logged of
cells and of the study), `runs` (what is logged of a trial; finds and writes runs), `client` (opens
MLflow), `pages` (addresses and views). This is the only room that imports MLflow.
"""
