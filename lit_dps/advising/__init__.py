"""The former place of `lit_dps.advice`: class paths in users' files keep working."""
