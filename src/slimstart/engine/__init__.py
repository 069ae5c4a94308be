"""How one step runs: which forwards, and what must hold around them. Chosen by SparseTraining, invisible to the user.

`eager.py` runs the user's loss function as it is. Nothing here knows masks or keep-probabilities.
"""

from slimstart.engine.eager import check_finite, forward_without_trace, undoing_statistics

__all__ = ["check_finite", "forward_without_trace", "undoing_statistics"]
