"""Core: plain data and rules. No torch, no database.

Read in this order: `trial` (cells, trials and their results), `goal`, `attempt` (one run of a trial
and what its checks decide), `racing`, `search_space`, `record` (a stored study), `config`. This
room imports no other room.
"""
