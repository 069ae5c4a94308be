"""Methods to compare with. Compare with `uniform` and `shallow` first.

- Built narrow before training: `built_narrow.py`.
- Cut after training, by a function `choose(trained) -> mask`: `l1_filter.py`, `soft_filter.py`, `thinet.py`,
  `provable.py`, `slimming.py`. `pruning.py` says what such a function is given, `shares.py` distributes widths,
  `activations.py` observes the inputs of layers.
- Learned as gates by the chain rule, on the dense network (`gated_network.py`): `gates.py` has what they share,
  `sampled_gates.py`, `thresholded_gates.py` and `grow_efficient.py` the kinds.

How a run trains with them is in `slimstart.lab.run`. docs/methods.md compares them with their authors' versions.
"""

from slimstart.lab.methods import l1_filter, provable, slimming, soft_filter, thinet
from slimstart.lab.methods.built_narrow import (
    front_heavy,
    random_mask,
    uniform,
    uniform_mask,
    uniform_of_flops,
    wide_sibling,
)
from slimstart.lab.methods.gated_network import RELAXATIONS
from slimstart.lab.methods.pruning import PROTOCOLS as PRUNING_PROTOCOLS
from slimstart.lab.methods.pruning import Choose, Rounds, Trained

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
    "uniform",
    "uniform_mask",
    "uniform_of_flops",
    "wide_sibling",
]
