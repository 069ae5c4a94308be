"""One rule per operation: what it does to the channels of its inputs.

A rule has one signature, `rule(tracer, call) -> None`, and is added by decorator under the operation's ATen name,
without overload and without the underscore of the in-place form. It reads values through the tracer, writes down what
must be true in `tracer.ledger`, and sets the value of the result. An operation without a rule is decomposed if PyTorch
knows how; otherwise everything it touches is left whole, with that reason.

`shapes.py` moves entries about, `pointwise.py` combines them, `mixing.py` are the layers, `norms.py` and
`reductions.py` what their names say.
"""

from slimstart.graph.rules import mixing, norms, pointwise, reductions, shapes
from slimstart.graph.rules.register import rule_for

__all__ = ["mixing", "norms", "pointwise", "reductions", "rule_for", "shapes"]
