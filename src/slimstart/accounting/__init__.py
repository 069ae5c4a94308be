"""What a network costs: FLOPs of one forward. Knows nothing of the rest of slimstart."""

from slimstart.accounting.flops import flops

__all__ = ["flops"]
