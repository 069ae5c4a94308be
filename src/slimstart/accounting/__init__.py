"""What things cost: FLOPs of one forward (`flops`), of a whole training (`train_cost`), and time (`timing`).

Knows networks only as modules that can be run. The cost table of a traced network lives in `slimstart.costs`.
"""

from slimstart.accounting.flops import counting, flops

__all__ = ["counting", "flops"]
