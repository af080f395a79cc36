"""Forecast: how many steps, checks and seconds a study takes, before it runs."""
