"""One rule per operation: what it does to the channels of its inputs.

A rule has one signature, `rule(tracer, call) -> None`, and is registered by decorator (`register_rule`) under the
operation's ATen name. It reads what is known of the inputs from the tracer, adds to `tracer.constraints`, and sets the
channels of the result. An operation without a rule is decomposed where PyTorch can; otherwise none of its inputs can
shrink, with that as the reason.

Open `pointwise.py` first. `shapes.py` are operations that move entries, `mixing.py` layers and products that read all
channels, `norms.py` normalisation, and `reductions.py` pooling, sums and softmax.
"""

from slimstart.graph.rules import mixing, norms, pointwise, reductions, shapes
from slimstart.graph.rules.register import register_rule, rule_for

__all__ = ["mixing", "norms", "pointwise", "reductions", "register_rule", "rule_for", "shapes"]
