"""Several processes that train one network.

Open `launch.py` first: joining the processes that torchrun starts, and DistributedDataParallel. `process_group.py` is
what the rest of the library knows of other processes: averages, broadcasts, checks that all hold the same.
`sync_batchnorm.py` has batch norm with statistics over all processes, on any device.
"""

from slimstart.distributed.launch import data_parallel, joined
from slimstart.distributed.sync_batchnorm import SynchronisedBatchNorm, synchronise_batch_norm

__all__ = ["SynchronisedBatchNorm", "data_parallel", "joined", "synchronise_batch_norm"]
