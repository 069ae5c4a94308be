"""Operations that plain torch does in too many passes: a Triton kernel on a GPU, the same numbers from torch elsewhere.

`backend.py` chooses between the two, `moves.py` moves the elements of many tensors at once, `channels.py` picks some
channels of an activation, `norm.py` joins batch norm with the sum and the ReLU behind it, `depthwise.py` convolves
whatever the number of channels is; `tiles.py` is what these two share. Nothing here knows networks, masks or
optimizers: tensors in, tensors out, without a word from the host in between, so that a CUDA graph can hold it. Device
code is in the `*_triton.py` files, which are imported when they are first used.
"""

from slimstart.kernels.backend import use_triton
from slimstart.kernels.moves import Move, Moves
from slimstart.kernels.take_channels import take_channels

__all__ = ["Move", "Moves", "take_channels", "use_triton"]
