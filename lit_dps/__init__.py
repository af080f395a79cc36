"""lit_dps: how batch size and sparsity rule the number of steps that training a network takes."""

__version__ = "0.1.0"
