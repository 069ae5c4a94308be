"""Image data sets: one `load` by name, batches that are a pure function of (seed, epoch, index).

Here live the embedded set (`fashion`), CIFAR, Tiny ImageNet and folders of images, and what reads them: archives
without extraction, pickles without execution, downloads that resume. Nothing here knows networks. Open `batches.py`
first; `arrays.py` is the loader for everything that fits in memory, `own_data.py` says what a factory of the user's own
returns, `augmentation.py` has RandAugment, mixup and CutMix.
"""

from slimstart.lab.data.arrays import ArraySet
from slimstart.lab.data.batches import WHOLE, Batches, ImageData, Share
from slimstart.lab.data.catalogue import NAMES, load

__all__ = ["NAMES", "WHOLE", "ArraySet", "Batches", "ImageData", "Share", "load"]
