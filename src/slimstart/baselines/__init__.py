"""Methods to compare with, one file each. `narrow` is the one that a sceptic asks for first.

`narrow.py` and `random_structure.py` build a narrow network before it is trained. A method that cuts a trained network
is a function `choose(trained) -> mask`: `pruning.py` says what it is given, `activations.py` what layers see,
`shares.py` how widths are dealt out; the methods are `l1_filter.py`, `soft_filter.py`, `thinet.py`, `provable.py` and
`slimming.py`. One that learns gates by the chain rule is a module of gates: `gates.py` has what they share,
`sampled_gates.py`, `thresholded_gates.py` and `grow_efficient.py` how they follow from what is learned,
`relaxations.py` their names. The training program does everything else, and is the same for all: `slimstart.recipes`.
docs/baselines.md says where they follow their authors.
"""

from slimstart.baselines import l1_filter, provable, slimming, soft_filter, thinet
from slimstart.baselines.narrow import front_heavy, narrow, narrow_to, uniform_mask
from slimstart.baselines.pruning import PROTOCOLS as PRUNING_PROTOCOLS
from slimstart.baselines.pruning import Choose, Rounds, Trained
from slimstart.baselines.random_structure import random_mask, random_structure
from slimstart.baselines.relaxations import RELAXATIONS

PRUNERS: dict[str, Choose] = {
    "l1": l1_filter.choose,
    "soft": soft_filter.choose,
    "thinet": thinet.choose,
    "provable": provable.choose,
    "slimming": slimming.choose,
}

# Ways to use a method, and of those that one method alone has, which one.
OWN_PROTOCOLS: dict[str, str] = {"folded": "soft", "front_heavy": "narrow"}
PROTOCOLS = (*PRUNING_PROTOCOLS, *OWN_PROTOCOLS)

# What is left of the network after each of several rounds, where it is not `pruning.even_rounds`.
ROUNDS: dict[str, Rounds] = {"thinet": thinet.round_fractions}

__all__ = [
    "OWN_PROTOCOLS",
    "PROTOCOLS",
    "PRUNERS",
    "RELAXATIONS",
    "ROUNDS",
    "Trained",
    "front_heavy",
    "narrow",
    "narrow_to",
    "random_mask",
    "random_structure",
    "uniform_mask",
]
