"""Runs a study: checks it, starts workers and ranks, tells how far it is."""
