"""Operations for which plain torch needs too many passes: Triton kernels on a GPU, the same in plain torch elsewhere.

Open `moves.py` first: it copies elements between many dense and narrow tensors at once. `take_channels.py` selects
channels of an activation, `norm.py` fuses batch norm with the sum and the ReLU after it, and `depthwise.py` is one
depthwise convolution for all numbers of channels. `backend.py` chooses between Triton and torch; `tiles.py` has what
`norm.py` and `depthwise.py` share. Nothing here knows networks, masks or optimizers: tensors in, tensors out. No
operation reads a value on the host, so a CUDA graph can hold it. Device code is in the `*_triton.py` files, which are
imported on first use.
"""

from slimstart.kernels.backend import use_triton
from slimstart.kernels.moves import Move, Moves
from slimstart.kernels.take_channels import take_channels

__all__ = ["Move", "Moves", "take_channels", "use_triton"]
