"""One thread for every test, as trials have it: results do not depend on the machine, and busy cores do no harm."""

import torch

torch.set_num_threads(1)
