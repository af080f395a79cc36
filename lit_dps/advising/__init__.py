"""Advice on a user's own module and data: measures what `lit_dps.advice` thinks about, within a budget of time."""
