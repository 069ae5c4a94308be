"""Full-size networks for cost and timing tests, separate from the small zoo."""

from .cnn import VGG, Bottleneck, ResNet
from .transformers import FusedAttention, ViT

VGG19 = (64, 64, "M", 128, 128, "M", 256, 256, 256, 256, "M", 512, 512, 512, 512, "M", 512, 512, 512, 512, "M")


def resnet50(num_classes=1000):
    """ResNet-50 for 224x224 images."""
    return ResNet(Bottleneck, (3, 4, 6, 3), (64, 128, 256, 512), num_classes, stem="imagenet")


def vit_large(num_classes=1000):
    """A ViT-L/16 for 224x224 images: 24 layers, dim 1024, 16 heads, hidden 4096."""
    return ViT(FusedAttention, 224, 16, 1024, 24, 16, 4096, num_classes)


def vgg19_bn(num_classes=10):
    """VGG-19 with batch norm for 32x32 images."""
    return VGG(VGG19, num_classes)
