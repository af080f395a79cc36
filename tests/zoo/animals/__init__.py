"""Modules, data modules and callbacks as users write them: they know PyTorch and Lightning, and
nothing else."""
