"""Tracking: shows studies in MLflow.

A study runs without MLflow, and its MLflow runs can be made again from storage. Read in this order:
`sync` (logs a study while it runs, or afterwards), `tracker` (what is logged), `client` (opens
MLflow). This is the only room that imports MLflow.
"""
