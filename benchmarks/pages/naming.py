"""Names of networks and data sets, as documents write them."""

MODELS = {
    "vgg16": "VGG-16",
    "vgg19": "VGG-19",
    "resnet20": "ResNet-20",
    "resnet32": "ResNet-32",
    "resnet50": "ResNet-50",
    "resnet56": "ResNet-56",
    "resnet110": "ResNet-110",
    "wrn28_10": "WRN-28-10",
    "mobilenet_v1": "MobileNetV1",
}
DATA = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "benchmarks.small_cifar:cifar10": "10,000 images of CIFAR-10",
    "benchmarks.small_cifar:cifar100": "10,000 images of CIFAR-100",
    "tiny_imagenet": "Tiny ImageNet",
    "tiny_imagenet16": "16 classes of Tiny ImageNet",
}


def model_title(model: str) -> str:
    return MODELS.get(model, model)


def data_title(data: str) -> str:
    return DATA.get(data, data)
