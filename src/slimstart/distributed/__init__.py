"""Training of one network with several processes.

Open `launch.py` first: the process group of torchrun, and DistributedDataParallel. `process_group.py` has the
collective operations that the rest of the library uses: averages, broadcasts, checks for equality. `sync_batchnorm.py`
is batch norm with statistics over all processes, on any device.
"""

from slimstart.distributed.launch import data_parallel, joined
from slimstart.distributed.sync_batchnorm import SynchronisedBatchNorm, synchronise_batch_norm

__all__ = ["SynchronisedBatchNorm", "data_parallel", "joined", "synchronise_batch_norm"]
