"""Convolutional networks, written the way people write them."""

import torch
import torch.nn.functional as F
from torch import nn

# --------------------------------------------------------------------------- VGG


class VGG(nn.Module):
    """VGG with batch norm: a configuration list of widths and "M" for max pooling."""

    def __init__(self, cfg=(8, "M", 16, "M", 16, 16, "M", 24, 24, "M"), num_classes=10, in_channels=3, bias=True):
        super().__init__()
        layers = []
        c = in_channels
        for v in cfg:
            if v == "M":
                layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
            else:
                layers += [nn.Conv2d(c, v, 3, padding=1, bias=bias), nn.BatchNorm2d(v), nn.ReLU(inplace=True)]
                c = v
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(c, num_classes)

    def forward(self, x):
        x = self.features(x)
        x = x.flatten(1)
        return self.classifier(x)


class VGGPlain(nn.Module):
    """VGG without batch norm: 2x2 feature maps go flat into hidden linear layers with dropout."""

    def __init__(self, widths=(8, 12, 16), hidden=20, num_classes=10):
        super().__init__()
        layers, c = [], 3
        for w in widths:
            layers += [nn.Conv2d(c, w, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
            c = w
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(c * 2 * 2, hidden),
            nn.ReLU(True),
            nn.Dropout(),
            nn.Linear(hidden, hidden),
            nn.ReLU(True),
            nn.Dropout(),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, x):
        x = self.features(x)
        x = x.view(x.size(0), -1)
        return self.classifier(x)


# --------------------------------------------------------------------------- ResNets


def conv3x3(cin, cout, stride=1, groups=1, dilation=1):
    return nn.Conv2d(
        cin, cout, kernel_size=3, stride=stride, padding=dilation, groups=groups, bias=False, dilation=dilation
    )


def conv1x1(cin, cout, stride=1):
    return nn.Conv2d(cin, cout, kernel_size=1, stride=stride, bias=False)


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, inplanes, planes, stride=1, downsample=None, norm_layer=nn.BatchNorm2d, **_):
        super().__init__()
        self.conv1 = conv3x3(inplanes, planes, stride)
        self.bn1 = norm_layer(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(planes, planes)
        self.bn2 = norm_layer(planes)
        self.downsample = downsample

    def gate(self, out):
        return out

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out = self.gate(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(
        self, inplanes, planes, stride=1, downsample=None, norm_layer=nn.BatchNorm2d, groups=1, mid_ratio=1, **_
    ):
        super().__init__()
        width = planes * mid_ratio
        self.conv1 = conv1x1(inplanes, width)
        self.bn1 = norm_layer(width)
        self.conv2 = conv3x3(width, width, stride, groups)
        self.bn2 = norm_layer(width)
        self.conv3 = conv1x1(width, planes * self.expansion)
        self.bn3 = norm_layer(planes * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class SEConv(nn.Module):
    """Squeeze and excitation with two 1x1 convolutions."""

    def __init__(self, channels, squeeze):
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, squeeze, 1)
        self.fc2 = nn.Conv2d(squeeze, channels, 1)

    def forward(self, x):
        scale = F.relu(self.fc1(self.avgpool(x)))
        scale = torch.sigmoid(self.fc2(scale))
        return scale * x


class SELinear(nn.Module):
    """Squeeze and excitation with two linear layers."""

    def __init__(self, channels, squeeze):
        super().__init__()
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(
            nn.Linear(channels, squeeze, bias=False),
            nn.ReLU(inplace=True),
            nn.Linear(squeeze, channels, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x):
        b, c, _, _ = x.size()
        y = self.avg_pool(x).view(b, c)
        y = self.fc(y).view(b, c, 1, 1)
        return x * y.expand_as(x)


class SEConvBlock(BasicBlock):
    def __init__(self, inplanes, planes, *args, **kwargs):
        super().__init__(inplanes, planes, *args, **kwargs)
        self.se = SEConv(planes, planes // 2)

    def gate(self, out):
        return self.se(out)


class SELinearBlock(BasicBlock):
    def __init__(self, inplanes, planes, *args, **kwargs):
        super().__init__(inplanes, planes, *args, **kwargs)
        self.se = SELinear(planes, planes // 2)

    def gate(self, out):
        return self.se(out)


class ResNet(nn.Module):
    """The standard residual network; projection (option B) shortcuts."""

    def __init__(
        self,
        block=BasicBlock,
        layers=(1, 1, 1),
        widths=(8, 16, 24),
        num_classes=10,
        norm_layer=nn.BatchNorm2d,
        groups=1,
        mid_ratio=1,
        stem="cifar",
        zero_init_residual=False,
    ):
        super().__init__()
        self.norm_layer = norm_layer
        self.groups, self.mid_ratio = groups, mid_ratio
        self.inplanes = widths[0]
        if stem == "imagenet":
            self.conv1 = nn.Conv2d(3, self.inplanes, kernel_size=7, stride=2, padding=3, bias=False)
            self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        else:
            self.conv1 = conv3x3(3, self.inplanes)
            self.maxpool = nn.Identity()
        self.bn1 = norm_layer(self.inplanes)
        self.relu = nn.ReLU(inplace=True)
        stages = []
        for i, (n, w) in enumerate(zip(layers, widths, strict=True)):
            stages.append(self._make_layer(block, w, n, stride=1 if i == 0 else 2))
        self.layers = nn.Sequential(*stages)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(widths[-1] * block.expansion, num_classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
            if zero_init_residual and isinstance(m, Bottleneck):
                nn.init.constant_(m.bn3.weight, 0)
            elif zero_init_residual and isinstance(m, BasicBlock):
                nn.init.constant_(m.bn2.weight, 0)

    def _make_layer(self, block, planes, blocks, stride):
        downsample = None
        if stride != 1 or self.inplanes != planes * block.expansion:
            downsample = nn.Sequential(
                conv1x1(self.inplanes, planes * block.expansion, stride),
                self.norm_layer(planes * block.expansion),
            )
        kwargs = {"norm_layer": self.norm_layer, "groups": self.groups, "mid_ratio": self.mid_ratio}
        layers = [block(self.inplanes, planes, stride, downsample, **kwargs)]
        self.inplanes = planes * block.expansion
        for _ in range(1, blocks):
            layers.append(block(self.inplanes, planes, **kwargs))
        return nn.Sequential(*layers)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.maxpool(x)
        x = self.layers(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.fc(x)


def group_norm(channels):
    return nn.GroupNorm(4, channels)


class PadShortcut(nn.Module):
    """The parameter-free shortcut (option A): every other pixel, zeros for the new channels."""

    def __init__(self, extra):
        super().__init__()
        self.extra = extra

    def forward(self, x):
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.extra // 2, self.extra - self.extra // 2), "constant", 0)


class ResNetOptionA(nn.Module):
    """The CIFAR ResNet of the original paper, with option A shortcuts."""

    def __init__(self, n=1, widths=(8, 16, 24), num_classes=10):
        super().__init__()
        self.conv1 = conv3x3(3, widths[0])
        self.bn1 = nn.BatchNorm2d(widths[0])
        blocks, c = [], widths[0]
        for i, w in enumerate(widths):
            for j in range(n):
                if i > 0 and j == 0:
                    blocks.append(BasicBlock(c, w, 2, downsample=PadShortcut(w - c)))
                else:
                    blocks.append(BasicBlock(c, w))
                c = w
        self.blocks = nn.ModuleList(blocks)
        self.linear = nn.Linear(c, num_classes)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        for block in self.blocks:
            out = block(out)
        out = F.avg_pool2d(out, out.size()[3])
        out = out.view(out.size(0), -1)
        return self.linear(out)


class PreActBlock(nn.Module):
    def __init__(self, cin, cout, stride, drop_rate=0.0):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(cin)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = conv3x3(cin, cout, stride)
        self.bn2 = nn.BatchNorm2d(cout)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(cout, cout)
        self.drop_rate = drop_rate
        self.equal = cin == cout
        self.shortcut = None if self.equal else conv1x1(cin, cout, stride)

    def forward(self, x):
        if not self.equal:
            x = self.relu1(self.bn1(x))
        else:
            out = self.relu1(self.bn1(x))
        out = self.relu2(self.bn2(self.conv1(out if self.equal else x)))
        if self.drop_rate > 0:
            out = F.dropout(out, p=self.drop_rate, training=self.training)
        out = self.conv2(out)
        return torch.add(x if self.equal else self.shortcut(x), out)


class WideResNet(nn.Module):
    """Pre-activation wide residual network."""

    def __init__(self, widths=(6, 8, 16, 24), n=2, num_classes=10):
        super().__init__()
        self.conv1 = conv3x3(3, widths[0])
        blocks = []
        for i in range(3):
            for j in range(n):
                cin = widths[i] if j == 0 else widths[i + 1]
                blocks.append(PreActBlock(cin, widths[i + 1], 2 if i > 0 and j == 0 else 1))
        self.blocks = nn.Sequential(*blocks)
        self.bn1 = nn.BatchNorm2d(widths[3])
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(widths[3], num_classes)

    def forward(self, x):
        out = self.conv1(x)
        out = self.blocks(out)
        out = self.relu(self.bn1(out))
        out = F.adaptive_avg_pool2d(out, 1)
        out = out.reshape(out.shape[0], -1)
        return self.fc(out)


# --------------------------------------------------------------------------- mobile networks


class MobileNetV1(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()

        def conv_bn(inp, oup, stride):
            return nn.Sequential(
                nn.Conv2d(inp, oup, 3, stride, 1, bias=False), nn.BatchNorm2d(oup), nn.ReLU(inplace=True)
            )

        def conv_dw(inp, oup, stride):
            return nn.Sequential(
                nn.Conv2d(inp, inp, 3, stride, 1, groups=inp, bias=False),
                nn.BatchNorm2d(inp),
                nn.ReLU(inplace=True),
                nn.Conv2d(inp, oup, 1, 1, 0, bias=False),
                nn.BatchNorm2d(oup),
                nn.ReLU(inplace=True),
            )

        self.model = nn.Sequential(
            conv_bn(3, 8, 1),
            conv_dw(8, 12, 1),
            conv_dw(12, 16, 2),
            conv_dw(16, 16, 1),
            conv_dw(16, 24, 2),
            nn.AvgPool2d(4),
        )
        self.fc = nn.Linear(24, num_classes)

    def forward(self, x):
        x = self.model(x)
        x = x.view(-1, self.fc.in_features)
        return self.fc(x)


class InvertedResidual(nn.Module):
    def __init__(self, inp, oup, stride, expand_ratio):
        super().__init__()
        hidden = round(inp * expand_ratio)
        self.use_res_connect = stride == 1 and inp == oup
        layers = []
        if expand_ratio != 1:
            layers += [nn.Conv2d(inp, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True)]
        layers += [
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, oup, 1, bias=False),
            nn.BatchNorm2d(oup),
        ]
        self.conv = nn.Sequential(*layers)

    def forward(self, x):
        if self.use_res_connect:
            return x + self.conv(x)
        return self.conv(x)


class MobileNetV2(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(inplace=True))
        self.blocks = nn.Sequential(
            InvertedResidual(8, 8, 1, 1),
            InvertedResidual(8, 12, 2, 2),
            InvertedResidual(12, 12, 1, 2),
            InvertedResidual(12, 16, 2, 2),
            InvertedResidual(16, 16, 1, 1.5),
        )
        self.last = nn.Sequential(nn.Conv2d(16, 24, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU6(inplace=True))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(24, num_classes))

    def forward(self, x):
        x = self.last(self.blocks(self.stem(x)))
        x = nn.functional.adaptive_avg_pool2d(x, (1, 1))
        x = torch.flatten(x, 1)
        return self.classifier(x)


def channel_shuffle(x, groups):
    n, c, h, w = x.shape
    x = x.view(n, groups, c // groups, h, w)
    x = x.transpose(1, 2).contiguous()
    return x.reshape(n, c, h, w)


class ShuffleUnit(nn.Module):
    def __init__(self, inp, oup, stride):
        super().__init__()
        self.stride = stride
        half = oup // 2
        if stride > 1:
            self.branch1 = nn.Sequential(
                nn.Conv2d(inp, inp, 3, stride, 1, groups=inp, bias=False),
                nn.BatchNorm2d(inp),
                nn.Conv2d(inp, half, 1, bias=False),
                nn.BatchNorm2d(half),
                nn.ReLU(inplace=True),
            )
        self.branch2 = nn.Sequential(
            nn.Conv2d(inp if stride > 1 else half, half, 1, bias=False),
            nn.BatchNorm2d(half),
            nn.ReLU(inplace=True),
            nn.Conv2d(half, half, 3, stride, 1, groups=half, bias=False),
            nn.BatchNorm2d(half),
            nn.Conv2d(half, half, 1, bias=False),
            nn.BatchNorm2d(half),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        if self.stride == 1:
            x1, x2 = x.chunk(2, dim=1)
            out = torch.cat((x1, self.branch2(x2)), dim=1)
        else:
            out = torch.cat((self.branch1(x), self.branch2(x)), dim=1)
        return channel_shuffle(out, 2)


class ShuffleNetV2(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.stage2 = nn.Sequential(ShuffleUnit(8, 16, 2), ShuffleUnit(16, 16, 1), ShuffleUnit(16, 16, 1))
        self.stage3 = nn.Sequential(ShuffleUnit(16, 24, 2), ShuffleUnit(24, 24, 1))
        self.conv5 = nn.Sequential(nn.Conv2d(24, 20, 1, bias=False), nn.BatchNorm2d(20), nn.ReLU(inplace=True))
        self.fc = nn.Linear(20, num_classes)

    def forward(self, x):
        x = self.conv1(x)
        x = self.stage2(x)
        x = self.stage3(x)
        x = self.conv5(x)
        x = x.mean([2, 3])
        return self.fc(x)


# --------------------------------------------------------------------------- concatenating networks


class DenseLayer(nn.Module):
    def __init__(self, cin, growth, bn_size=2):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(cin)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(cin, bn_size * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(bn_size * growth)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(bn_size * growth, growth, 3, padding=1, bias=False)

    def forward(self, inputs):
        x = torch.cat(inputs, 1)
        x = self.conv1(self.relu1(self.norm1(x)))
        return self.conv2(self.relu2(self.norm2(x)))


class DenseBlock(nn.Module):
    def __init__(self, layers, cin, growth):
        super().__init__()
        self.layers = nn.ModuleList([DenseLayer(cin + i * growth, growth) for i in range(layers)])

    def forward(self, x):
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    def __init__(self, growth=6, block_config=(3, 3), init=8, num_classes=10):
        super().__init__()
        c = init
        self.features = nn.Sequential()
        self.features.add_module("conv0", nn.Conv2d(3, c, 3, padding=1, bias=False))
        for i, n in enumerate(block_config):
            self.features.add_module(f"block{i}", DenseBlock(n, c, growth))
            c += n * growth
            if i != len(block_config) - 1:
                self.features.add_module(
                    f"transition{i}",
                    nn.Sequential(
                        nn.BatchNorm2d(c),
                        nn.ReLU(inplace=True),
                        nn.Conv2d(c, c // 2, 1, bias=False),
                        nn.AvgPool2d(2, stride=2),
                    ),
                )
                c = c // 2
        self.features.add_module("norm5", nn.BatchNorm2d(c))
        self.classifier = nn.Linear(c, num_classes)

    def forward(self, x):
        features = self.features(x)
        out = F.relu(features, inplace=True)
        out = F.adaptive_avg_pool2d(out, (1, 1))
        out = torch.flatten(out, 1)
        return self.classifier(out)


class ConvBNReLU(nn.Module):
    def __init__(self, cin, cout, **kwargs):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, bias=False, **kwargs)
        self.bn = nn.BatchNorm2d(cout, eps=0.001)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)), inplace=True)


class InceptionBlock(nn.Module):
    def __init__(self, cin, c1, c3r, c3, c5r, c5, cpool):
        super().__init__()
        self.branch1 = ConvBNReLU(cin, c1, kernel_size=1)
        self.branch2 = nn.Sequential(ConvBNReLU(cin, c3r, kernel_size=1), ConvBNReLU(c3r, c3, kernel_size=3, padding=1))
        self.branch3 = nn.Sequential(
            ConvBNReLU(cin, c5r, kernel_size=1),
            ConvBNReLU(c5r, c5, kernel_size=(1, 5), padding=(0, 2)),
            ConvBNReLU(c5, c5, kernel_size=(5, 1), padding=(2, 0)),
        )
        self.branch4 = ConvBNReLU(cin, cpool, kernel_size=1)

    def forward(self, x):
        branch4 = self.branch4(F.max_pool2d(x, kernel_size=3, stride=1, padding=1))
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), branch4], 1)


class Inception(nn.Module):
    """Parallel branches; with `aux`, training also gives the logits of an auxiliary classifier."""

    def __init__(self, aux=False, num_classes=10):
        super().__init__()
        self.stem = ConvBNReLU(3, 8, kernel_size=3, padding=1)
        self.a = InceptionBlock(8, 6, 4, 8, 4, 4, 4)
        self.b = InceptionBlock(22, 8, 6, 8, 4, 4, 4)
        if aux:
            self.aux = nn.Sequential(
                nn.AdaptiveAvgPool2d(2), nn.Conv2d(22, 6, 1), nn.ReLU(), nn.Flatten(), nn.Linear(24, num_classes)
            )
        else:
            self.aux = None
        self.dropout = nn.Dropout(0.4)
        self.fc = nn.Linear(24, num_classes)

    def forward(self, x):
        x = F.max_pool2d(self.stem(x), 2)
        x = self.a(x)
        aux = self.aux(x) if self.aux is not None and self.training else None
        x = F.max_pool2d(x, 2)
        x = self.b(x)
        x = F.adaptive_avg_pool2d(x, 1).flatten(start_dim=1)
        x = self.fc(self.dropout(x))
        if aux is not None:
            return x, aux
        return x


class DoubleConv(nn.Sequential):
    def __init__(self, cin, cout):
        super().__init__(
            nn.Conv2d(cin, cout, 3, padding=1, bias=False),
            nn.BatchNorm2d(cout),
            nn.ReLU(inplace=True),
            nn.Conv2d(cout, cout, 3, padding=1, bias=False),
            nn.BatchNorm2d(cout),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Encoder and decoder with skip concatenations; transposed convolutions or interpolation on the way up."""

    def __init__(self, bilinear=False, out_channels=2):
        super().__init__()
        self.bilinear = bilinear
        self.inc = DoubleConv(3, 8)
        self.down1 = DoubleConv(8, 12)
        self.down2 = DoubleConv(12, 16)
        if bilinear:
            self.up1 = nn.Conv2d(16, 12, 1)
            self.up2 = nn.Conv2d(12, 8, 1)
        else:
            self.up1 = nn.ConvTranspose2d(16, 12, kernel_size=2, stride=2)
            self.up2 = nn.ConvTranspose2d(12, 8, kernel_size=2, stride=2)
        self.conv1 = DoubleConv(12 + 12, 12)
        self.conv2 = DoubleConv(8 + 8, 8)
        self.outc = nn.Conv2d(8, out_channels, 1)

    def upsample(self, layer, x, skip):
        if self.bilinear:
            x = F.interpolate(x, size=skip.shape[2:], mode="bilinear", align_corners=False)
        return torch.cat([skip, layer(x)], dim=1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(F.max_pool2d(x1, 2))
        x3 = self.down2(F.max_pool2d(x2, 2))
        x = self.conv1(self.upsample(self.up1, x3, x2))
        x = self.conv2(self.upsample(self.up2, x, x1))
        return self.outc(x)


class CatFlatten(nn.Module):
    """Channel concatenation goes flat into a linear layer, together with a pooled vector."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.left = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.right = nn.Conv2d(3, 10, 5, stride=2, padding=2)
        self.pool = nn.MaxPool2d(4)
        self.fc1 = nn.Linear(18 * 2 * 2 + 10, 16)
        self.fc2 = nn.Linear(16, num_classes)

    def forward(self, x):
        a = F.relu(self.left(x))
        b = F.relu(self.right(x))
        flat = self.pool(torch.cat([a, b], dim=1)).flatten(1)
        flat = torch.cat([flat, b.amax(dim=(2, 3))], dim=-1)
        return self.fc2(torch.tanh(self.fc1(flat)))


# --------------------------------------------------------------------------- other norms, activations, dimensions


class ResBlockSR(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.ReLU(True), nn.Conv2d(c, c, 3, padding=1))
        self.res_scale = 0.1

    def forward(self, x):
        return x + self.body(x).mul(self.res_scale)


class SuperResolution(nn.Module):
    """Residual super-resolution with a pixel shuffle between convolutions and one at the end."""

    def __init__(self, c=8):
        super().__init__()
        self.head = nn.Conv2d(3, c, 3, padding=1)
        self.body = nn.Sequential(ResBlockSR(c), ResBlockSR(c), nn.Conv2d(c, c, 3, padding=1))
        self.up = nn.Sequential(nn.Conv2d(c, 4 * c, 3, padding=1), nn.PixelShuffle(2))
        self.tail = nn.Conv2d(c, 3 * 2**2, 3, padding=1)

    def forward(self, x):
        x = self.head(x)
        x = self.body(x) + x
        x = F.relu(self.up(x))
        return F.pixel_shuffle(self.tail(x), 2)


class InstanceNormNet(nn.Module):
    """Image to image with affine and plain instance norm, reflection padding."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.ReflectionPad2d(2),
            nn.Conv2d(3, 8, 5),
            nn.InstanceNorm2d(8, affine=True),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.InstanceNorm2d(16),
            nn.LeakyReLU(0.2),
            nn.Upsample(scale_factor=2, mode="nearest"),
            nn.Conv2d(16, 8, 3, padding=1),
            nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
            nn.ELU(),
            nn.Conv2d(8, 3, 3, padding=1),
            nn.Tanh(),
        )

    def forward(self, x):
        return self.model(x)


class PReLUHardswish(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.act1 = nn.PReLU(8)
        self.conv2 = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.act2 = nn.PReLU()
        self.conv3 = nn.Conv2d(12, 16, 3, stride=2, padding=1)
        self.act3 = nn.Hardswish()
        self.gate = nn.Conv2d(16, 16, 1)
        self.fc = nn.Linear(16, num_classes)

    def forward(self, x):
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.act2(self.conv2(x))
        x = self.act3(self.conv3(x))
        x = x * F.hardsigmoid(self.gate(x))
        x = F.adaptive_avg_pool2d(x, 1).squeeze(-1).squeeze(-1)
        return self.fc(x)


class LayerNorm2d(nn.Module):
    """LayerNorm over the channels of a channels-first image."""

    def __init__(self, c, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(c))
        self.bias = nn.Parameter(torch.zeros(c))
        self.eps = eps

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim, layer_scale_init_value=0.1):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 2 * dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(2 * dim, dim)
        self.gamma = nn.Parameter(layer_scale_init_value * torch.ones(dim))

    def forward(self, x):
        shortcut = x
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)
        x = self.norm(x)
        x = self.pwconv2(self.act(self.pwconv1(x)))
        x = self.gamma * x
        x = x.permute(0, 3, 1, 2)
        return shortcut + x


class ConvNeXt(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 2, stride=2), LayerNorm2d(8))
        self.stage1 = nn.Sequential(ConvNeXtBlock(8), ConvNeXtBlock(8))
        self.down = nn.Sequential(LayerNorm2d(8), nn.Conv2d(8, 12, 2, stride=2))
        self.stage2 = ConvNeXtBlock(12)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, num_classes)

    def forward(self, x):
        x = self.stage2(self.down(self.stage1(self.stem(x))))
        return self.head(self.norm(x.mean([-2, -1])))


class Conv1dNet(nn.Module):
    """Residual temporal convolutions with growing dilation."""

    def __init__(self, num_classes=5):
        super().__init__()
        self.conv1 = nn.Conv1d(4, 12, 5, padding=2)
        self.bn1 = nn.BatchNorm1d(12)
        self.conv2 = nn.Conv1d(12, 12, 3, padding=2, dilation=2)
        self.bn2 = nn.BatchNorm1d(12)
        self.conv3 = nn.Conv1d(12, 16, 3, padding=4, dilation=4)
        self.bn3 = nn.BatchNorm1d(16)
        self.pool = nn.AdaptiveMaxPool1d(1)
        self.fc = nn.Linear(16, num_classes)

    def forward(self, x):
        x = F.max_pool1d(F.relu(self.bn1(self.conv1(x))), 2)
        x = x + F.relu(self.bn2(self.conv2(x)))
        x = F.relu(self.bn3(self.conv3(x)))
        return self.fc(self.pool(x).squeeze(-1))


class Conv3dNet(nn.Module):
    def __init__(self, num_classes=5):
        super().__init__()
        self.conv1 = nn.Conv3d(2, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm3d(8)
        self.conv2 = nn.Conv3d(8, 8, (1, 3, 3), padding=(0, 1, 1), bias=False)
        self.bn2 = nn.BatchNorm3d(8)
        self.conv3 = nn.Conv3d(8, 12, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose3d(12, 8, 2, stride=2)
        self.head = nn.Conv3d(8 + 8, num_classes, 1)

    def forward(self, x):
        a = F.relu(self.bn1(self.conv1(x)))
        a = a + F.relu(self.bn2(self.conv2(a)))
        b = F.relu(self.conv3(a))
        return self.head(torch.cat([a, self.up(b)], 1)).mean(dim=(2, 3, 4))


class MeanPoolNet(nn.Module):
    """Every convolution strides; the global pool is a plain mean."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.c1 = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.c2 = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.c3 = nn.Conv2d(12, 16, 2, stride=2)
        self.fc = nn.Linear(16, num_classes)

    def forward(self, x):
        x = self.c1(x).relu()
        x = self.c2(x).relu()
        x = self.c3(x).relu()
        x = x.mean([2, 3])
        return self.fc(x)


class GatedConvNet(nn.Module):
    """GLU-style gating, by hand and by F.glu."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 24, 3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(12, 8, 1)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x):
        a, b = self.conv1(x).chunk(2, dim=1)
        x = a * torch.sigmoid(b)
        x = F.glu(self.conv2(x), dim=1)
        x = F.relu(self.conv3(x))
        return self.fc(x.mean((2, 3)))


class UnevenSplit(nn.Module):
    """A split with sizes kept as attributes: one part goes through a convolution, the other passes."""

    def __init__(self, a=6, b=10, num_classes=10):
        super().__init__()
        self.a, self.b = a, b
        self.stem = nn.Conv2d(3, a + b, 3, padding=1)
        self.bn = nn.BatchNorm2d(a + b)
        self.part = nn.Conv2d(a, a, 3, padding=1)
        self.merge = nn.Conv2d(a + b, 12, 1)
        self.fc = nn.Linear(12, num_classes)

    def forward(self, x):
        x = F.relu(self.bn(self.stem(x)))
        x1, x2 = torch.split(x, [self.a, self.b], dim=1)
        x = torch.cat((F.relu(self.part(x1)), x2), dim=1)
        x = F.relu(self.merge(x))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class StackUnbind(nn.Module):
    """Branches stacked on a new axis and weighted; stacked again and taken apart by unbind."""

    def __init__(self, c=8, num_classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, padding=1)
        self.branches = nn.ModuleList([nn.Conv2d(c, c, k, padding=k // 2) for k in (1, 3, 5)])
        self.weights = nn.Parameter(torch.ones(3))
        self.qv = nn.Conv2d(c, 2 * c, 1)
        self.fc = nn.Linear(c, num_classes)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = torch.stack([branch(x) for branch in self.branches], dim=0)
        x = (x * self.weights.softmax(0).view(-1, 1, 1, 1, 1)).sum(dim=0)
        n, c, h, w = x.shape
        q, v = self.qv(F.relu(x)).view(n, 2, c, h, w).unbind(dim=1)
        x = torch.stack((q, v), dim=1).amax(dim=1)
        return self.fc(x.mean(dim=(-2, -1)))


class DilatedNet(nn.Module):
    """Spatial pyramid of dilated convolutions plus an image-level branch."""

    def __init__(self, num_classes=3):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU())
        self.rates = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(12, 6, 3, padding=r, dilation=r, bias=False), nn.BatchNorm2d(6), nn.ReLU())
                for r in (1, 2, 3)
            ]
        )
        self.image = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(12, 6, 1), nn.ReLU())
        self.project = nn.Conv2d(24, 12, 1)
        self.out = nn.Conv2d(12, num_classes, 1)

    def forward(self, x):
        size = x.shape[-2:]
        x = self.stem(x)
        res = [branch(x) for branch in self.rates]
        res.append(F.interpolate(self.image(x), size=x.shape[-2:], mode="nearest"))
        x = F.relu(self.project(torch.cat(res, dim=1)))
        return F.interpolate(self.out(x), size=size, mode="bilinear", align_corners=False)


class DepthMultiplier(nn.Module):
    """Depthwise convolutions that give two outputs for each input channel."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 16, 3, padding=1, groups=8, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.pointwise = nn.Conv2d(16, 10, 1)
        self.fc = nn.Linear(10, num_classes)

    def forward(self, x):
        x = F.relu(self.conv(x))
        x = F.relu(self.bn(self.depthwise(x)))
        x = F.relu(self.pointwise(x))
        return self.fc(x.mean((2, 3)))


class Maxout(nn.Module):
    """The larger of each pair of neighbouring channels."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 24, 3, padding=1)
        self.fc = nn.Linear(12, num_classes)

    @staticmethod
    def maxout(x):
        n, c, h, w = x.shape
        return x.view(n, c // 2, 2, h, w).max(2)[0]

    def forward(self, x):
        x = F.max_pool2d(self.maxout(self.conv1(x)), 2)
        x = self.maxout(self.conv2(x))
        return self.fc(x.mean((2, 3)))


# --------------------------------------------------------------------------- attention over images


class ChannelSoftmax(nn.Module):
    """Soft assignment of each pixel to learned parts: the softmax runs over channels."""

    def __init__(self, parts=8, num_classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.assign = nn.Conv2d(12, parts, 1)
        self.fc = nn.Linear(parts * 12, num_classes)

    def forward(self, x):
        x = F.relu(self.stem(x))
        attention = F.softmax(self.assign(x), dim=1)
        pooled = torch.einsum("nkhw,nchw->nkc", attention, x)
        return self.fc(pooled.flatten(1))


class SpatialAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 7, padding=3, bias=False)

    def forward(self, x):
        avg = torch.mean(x, dim=1, keepdim=True)
        top, _ = torch.max(x, dim=1, keepdim=True)
        return x * torch.sigmoid(self.conv(torch.cat([avg, top], dim=1)))


class CBAMNet(nn.Module):
    """Channel attention, then spatial attention from the mean and the maximum over channels."""

    def __init__(self, c=12, num_classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.conv = nn.Conv2d(8, c, 3, padding=1)
        self.mlp = nn.Sequential(nn.Linear(c, c // 2), nn.ReLU(), nn.Linear(c // 2, c))
        self.spatial = SpatialAttention()
        self.fc = nn.Linear(c, num_classes)

    def forward(self, x):
        x = F.relu(self.conv(F.relu(self.stem(x))))
        n, c = x.shape[:2]
        gate = self.mlp(x.mean((2, 3))) + self.mlp(x.amax((2, 3)))
        x = x * torch.sigmoid(gate).view(n, c, 1, 1)
        x = self.spatial(x)
        return self.fc(x.mean((2, 3)))


class NonLocal(nn.Module):
    """Attention between pixels: channels are contracted, the softmax runs over positions."""

    def __init__(self, c=12, inner=8, num_classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, stride=2, padding=1)
        self.theta = nn.Conv2d(c, inner, 1)
        self.phi = nn.Conv2d(c, inner, 1)
        self.g = nn.Conv2d(c, inner, 1)
        self.out = nn.Conv2d(inner, c, 1)
        self.fc = nn.Linear(c, num_classes)

    def forward(self, x):
        x = F.relu(self.stem(x))
        b, _, h, w = x.shape
        theta = self.theta(x).flatten(2).transpose(1, 2)
        phi = self.phi(x).flatten(2)
        g = self.g(x).flatten(2).permute(0, 2, 1)
        y = torch.bmm(torch.softmax(torch.matmul(theta, phi), dim=-1), g)
        y = y.permute(0, 2, 1).contiguous().view(b, -1, h, w)
        return self.fc((x + self.out(y)).mean((2, 3)))


class GroupedUpsampling(nn.Module):
    """Transposed convolutions by channel, and in groups with other numbers of inputs and outputs."""

    def __init__(self, num_classes=5):
        super().__init__()
        self.stem = ConvBNReLU(3, 16, kernel_size=3, stride=2, padding=1)
        self.up1 = nn.ConvTranspose2d(16, 16, 4, stride=2, padding=1, groups=16)
        self.block = ConvBNReLU(16, 16, kernel_size=3, padding=1)
        self.up2 = nn.ConvTranspose2d(16, 8, 2, stride=2, groups=4)
        self.mix = nn.ConvTranspose2d(8, 12, 1)
        self.up3 = nn.ConvTranspose2d(12, 24, 2, stride=2, groups=4, bias=False)
        self.head = nn.Conv2d(24, num_classes, 1)

    def forward(self, x):
        x = self.block(self.up1(self.stem(x)))
        x = self.mix(F.relu(self.up2(x)))
        return self.head(F.relu(self.up3(x)))
