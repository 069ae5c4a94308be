"""Ways to use slimstart with what others have built; each is small, and none is needed.

`distributed.py` is for many processes under torchrun: start there. `batchnorm.py` has batch statistics over all of
them. What every room below may know of other processes is `slimstart.ranks`; a loop of a framework of its own needs no
more than the verbs of `SparseTraining`.
"""

from slimstart.integrations.batchnorm import SynchronisedBatchNorm, synchronise_batch_norm
from slimstart.integrations.distributed import data_parallel, joined

__all__ = ["SynchronisedBatchNorm", "data_parallel", "joined", "synchronise_batch_norm"]
