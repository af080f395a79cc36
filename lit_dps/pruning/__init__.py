"""Pruning before and during training: methods by name, and the masks that they return.

To add a method, write a file beside `snip.py` and add its class to `PRUNERS`. Methods of other
packages are named by their class path.
"""

from lit_dps.pruning.from_file import FromFile
from lit_dps.pruning.grasp import Grasp
from lit_dps.pruning.iterative import Force, IterativeSnip, SnipIt
from lit_dps.pruning.layerwise import RandomLayerwise, SmartRatio
from lit_dps.pruning.magnitude import Magnitude
from lit_dps.pruning.mask import Mask, prunable
from lit_dps.pruning.moving import Gradual, RigL, SnipItDuring, SparseEvolution
from lit_dps.pruning.network import Network, gradient_sum, saliency
from lit_dps.pruning.pruner import (
    PRUNERS,
    MaskUpdate,
    OneShot,
    Pruner,
    mask_flags,
    prune,
    pruner_of,
    top_k,
)
from lit_dps.pruning.random import Random
from lit_dps.pruning.shuffle import Shuffle
from lit_dps.pruning.snap import Snap, SnapIt
from lit_dps.pruning.snip import Snip
from lit_dps.pruning.synflow import SynFlow
from lit_dps.pruning.two_four import TwoFour

PRUNERS |= {
    "snip": Snip,
    "magnitude": Magnitude,
    "random": Random,
    "snip_it": SnipIt,
    "iterative_snip": IterativeSnip,
    "force": Force,
    "grasp": Grasp,
    "synflow": SynFlow,
    "snap": Snap,
    "snap_it": SnapIt,
    "random_layerwise": RandomLayerwise,
    "smart_ratio": SmartRatio,
    "shuffle": Shuffle,
    "rigl": RigL,
    "set": SparseEvolution,
    "gradual": Gradual,
    "snip_it_during": SnipItDuring,
    "two_four": TwoFour,
    "from_file": FromFile,
}


__all__ = [
    "PRUNERS",
    "Mask",
    "MaskUpdate",
    "Network",
    "OneShot",
    "Pruner",
    "gradient_sum",
    "mask_flags",
    "prunable",
    "prune",
    "pruner_of",
    "saliency",
    "top_k",
]
