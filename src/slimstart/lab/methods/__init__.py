"""Methods to compare with, one file each. Compare with `uniform` and `shallow` first.

- Built narrow before training: `uniform_widths.py`, `shallow.py`, `random_structure.py`.
- Cut after training, by a function `choose(trained) -> mask`: `l1_filter.py`, `soft_filter.py`, `thinet.py`,
  `provable.py`, `slimming.py`. `pruning.py` says what such a function is given, `shares.py` distributes widths,
  `activations.py` observes the inputs of layers, `masked_network.py` evaluates many masks in a row.
- Learned as gates by the chain rule, on the dense network (`gated_network.py`): `gates.py` has what they share,
  `sampled_gates.py`, `thresholded_gates.py` and `grow_efficient.py` the kinds, `relaxations.py` their names.

How a run trains with them is in `slimstart.lab.run`. docs/methods.md compares them with their authors' versions.
"""

from slimstart.lab.methods import l1_filter, provable, slimming, soft_filter, thinet
from slimstart.lab.methods.pruning import PROTOCOLS as PRUNING_PROTOCOLS
from slimstart.lab.methods.pruning import Choose, Rounds, Trained
from slimstart.lab.methods.random_structure import random_mask, random_structure
from slimstart.lab.methods.relaxations import RELAXATIONS
from slimstart.lab.methods.shallow import wide_sibling
from slimstart.lab.methods.uniform_widths import front_heavy, uniform, uniform_mask, uniform_of_flops

PRUNERS: dict[str, Choose] = {
    "l1": l1_filter.choose,
    "soft": soft_filter.choose,
    "thinet": thinet.choose,
    "provable": provable.choose,
    "slimming": slimming.choose,
}

# Protocols that a single method has, and that method.
OWN_PROTOCOLS: dict[str, str] = {"folded": "soft", "front_heavy": "uniform"}
PROTOCOLS = (*PRUNING_PROTOCOLS, *OWN_PROTOCOLS)

# The cost after each of several rounds, for methods that do not use `pruning.even_rounds`.
ROUNDS: dict[str, Rounds] = {"thinet": thinet.round_fractions}

__all__ = [
    "OWN_PROTOCOLS",
    "PROTOCOLS",
    "PRUNERS",
    "RELAXATIONS",
    "ROUNDS",
    "Trained",
    "front_heavy",
    "random_mask",
    "random_structure",
    "uniform",
    "uniform_mask",
    "uniform_of_flops",
    "wide_sibling",
]
