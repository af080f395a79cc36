"""Engines: who trains the trials."""
