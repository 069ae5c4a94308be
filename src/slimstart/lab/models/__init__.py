"""The networks of the paper's experiments, dense, and how a network is found by its name.

Plain PyTorch modules; tracing finds what can shrink. Every factory takes
`num_classes`, `in_channels` and `width`, which multiplies the channels of every layer. For images of 28 x 28: `small`;
of 32 x 32: `vgg16`, `vgg19`, `resnet20`, `resnet32`, `wrn28_10`; of 224 x 224: `resnet50`, `mobilenet_v1`. All pool at
the end, so they also accept other sizes.

Open `feed_forward.py` first (networks without branches), then `residual.py` and `layers.py` (common layers and
initialisation). `registry.py` has `build`, a network by name, and `from_factory`, a network of the user's own;
`siblings.py` has shallower networks of the same families.
"""

from slimstart.lab.models.feed_forward import mobilenet_v1, small, vgg16, vgg19
from slimstart.lab.models.registry import MODELS, build, from_factory
from slimstart.lab.models.residual import resnet20, resnet32, resnet50, wrn28_10
from slimstart.lab.models.siblings import parse_stages, siblings
from slimstart.lab.own_code import is_factory

__all__ = [
    "MODELS",
    "build",
    "from_factory",
    "is_factory",
    "mobilenet_v1",
    "parse_stages",
    "resnet20",
    "resnet32",
    "resnet50",
    "siblings",
    "small",
    "vgg16",
    "vgg19",
    "wrn28_10",
]
