"""Unusual but legal networks: sharing, control flow, odd inputs and outputs, sizes in code, channel arithmetic."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations


def pool(x):
    return F.adaptive_avg_pool2d(x, 1).flatten(1)


# --------------------------------------------------------------------------- sharing


class SharedConv(nn.Module):
    """One convolution, used twice in a row."""

    def __init__(self, c=12, num_classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, padding=1)
        self.shared = nn.Conv2d(c, c, 3, padding=1)
        self.fc = nn.Linear(c, num_classes)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = F.relu(self.shared(x))
        x = F.relu(self.shared(x))
        return self.fc(pool(x))


class Siamese(nn.Module):
    """One encoder on two inputs; the two embeddings are compared."""

    def __init__(self, c=8, out=6):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, c, 3, stride=2, padding=1),
            nn.BatchNorm2d(c),
            nn.ReLU(),
            nn.Conv2d(c, 2 * c, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.embed = nn.Linear(2 * c, 12)
        self.compare = nn.Linear(12, out)

    def forward(self, left, right):
        a = self.embed(pool(self.encoder(left)))
        b = self.embed(pool(self.encoder(right)))
        return self.compare(torch.abs(a - b))


class TiedAutoencoder(nn.Module):
    """The decoder uses the encoder's weights, transposed."""

    def __init__(self, din=12, hidden=8):
        super().__init__()
        self.enc1 = nn.Linear(din, 16)
        self.enc2 = nn.Linear(16, hidden)
        self.bias2 = nn.Parameter(torch.zeros(16))
        self.bias1 = nn.Parameter(torch.zeros(din))

    def forward(self, x):
        h = torch.relu(self.enc1(x))
        z = torch.relu(self.enc2(h))
        h = torch.relu(F.linear(z, self.enc2.weight.t(), self.bias2))
        return F.linear(h, self.enc1.weight.t(), self.bias1)


class TwoHeads(nn.Module):
    """Two outputs that share a trunk."""

    def __init__(self, c=12):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU())
        self.classes = nn.Linear(c, 5)
        self.seg1 = nn.Conv2d(c, 8, 3, padding=1)
        self.seg2 = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        x = self.trunk(x)
        return self.classes(pool(x)), self.seg2(F.relu(self.seg1(x)))


class FrozenLayer(nn.Module):
    """A pretrained stem that is not trained."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.stem.requires_grad_(False)
        self.conv = nn.Conv2d(8, 12, 3, padding=1)
        self.fc = nn.Linear(12, num_classes)

    def forward(self, x):
        with torch.no_grad():
            x = F.relu(self.stem(x))
        return self.fc(pool(F.relu(self.conv(x))))


class UnreadConv(nn.Module):
    """The output of one convolution is computed and then forgotten."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.unread = nn.Conv2d(8, 6, 3, padding=1)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        self.unread(x)
        return self.fc(pool(x))


# --------------------------------------------------------------------------- control flow, inputs, outputs


class ItemControl(nn.Module):
    """Which layers run depends on a value read from a tensor."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.extra = nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x):
        steps = 2 if x.abs().mean().item() > 0.1 else 0
        x = F.relu(self.conv1(x))
        for _ in range(steps):
            x = x + F.relu(self.extra(x))
        return self.fc(pool(x))


class DictModel(nn.Module):
    """Keyword inputs, a dictionary of outputs."""

    def __init__(self):
        super().__init__()
        self.image_net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3, padding=1), nn.ReLU()
        )
        self.table_net = nn.Sequential(nn.Linear(4, 12), nn.ReLU())
        self.head = nn.Linear(24, 5)
        self.value = nn.Linear(24, 1)

    def forward(self, image, table, temperature=1.0):
        z = torch.cat([pool(self.image_net(image)), self.table_net(table)], dim=1)
        return {"logits": self.head(z) / temperature, "value": self.value(z).squeeze(-1)}


class BatchDict(nn.Module):
    """A single dictionary as the one positional argument."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.fc = nn.Linear(8 + 4, 5)

    def forward(self, batch):
        x = pool(F.relu(self.conv(batch["image"])))
        return {"out": {"logits": self.fc(torch.cat([x, batch["table"]], -1))}, "size": x.shape[0]}


class NestedOutputs(nn.Module):
    """A tuple of inputs, nested lists of outputs: a feature pyramid."""

    def __init__(self, c=8):
        super().__init__()
        self.c1 = nn.Conv2d(3, c, 3, stride=2, padding=1)
        self.c2 = nn.Conv2d(c, 2 * c, 3, stride=2, padding=1)
        self.lateral = nn.ModuleList([nn.Conv2d(c, 6, 1), nn.Conv2d(2 * c, 6, 1)])
        self.heads = nn.ModuleList([nn.Conv2d(6, 2, 1), nn.Conv2d(6, 4, 1)])

    def forward(self, image, bias):
        f1 = F.relu(self.c1(image))
        f2 = F.relu(self.c2(f1))
        p2 = self.lateral[1](f2)
        p1 = self.lateral[0](f1) + F.interpolate(p2, scale_factor=2)
        outs = []
        for p in (p1, p2):
            outs.append([head(F.relu(p)) + bias for head in self.heads])
        return outs, (p1.mean(),)


class ReturnsStream(nn.Module):
    """The residual stream itself is the output."""

    def __init__(self, c=8):
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, padding=1)
        self.block1 = nn.Sequential(nn.Conv2d(c, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, c, 3, padding=1))
        self.block2 = nn.Sequential(nn.Conv2d(c, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, c, 3, padding=1))

    def forward(self, x):
        x = self.stem(x)
        x = x + self.block1(x)
        return x + self.block2(x)


# --------------------------------------------------------------------------- residual arithmetic


class ResidualChain(nn.Module):
    def __init__(self, c=12, depth=3, num_classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, padding=1)
        self.convs = nn.ModuleList([nn.Conv2d(c, c, 3, padding=1) for _ in range(depth)])
        self.fc = nn.Linear(c, num_classes)

    def forward(self, x):
        x = self.stem(x)
        for conv in self.convs:
            x = x + conv(x)
        return self.fc(pool(F.relu(x)))


class SigmoidResidual(nn.Module):
    """The branch of a zeroed channel is one half, not zero."""

    def __init__(self, c=8, num_classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, padding=1)
        self.conv = nn.Conv2d(c, c, 3, padding=1)
        self.last = nn.Conv2d(c, 12, 3, padding=1)
        self.fc = nn.Linear(12, num_classes)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = x + torch.sigmoid(self.conv(x))
        return self.fc(pool(F.relu(self.last(x))))


class MultiplicativeResidual(nn.Module):
    def __init__(self, c=8, num_classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, padding=1)
        self.conv1 = nn.Conv2d(c, c, 3, padding=1)
        self.conv2 = nn.Conv2d(c, c, 3, padding=1)
        self.fc = nn.Linear(c, num_classes)

    def forward(self, x):
        x = self.stem(x)
        x = x * self.conv1(x)
        x = x * (1 + torch.tanh(self.conv2(x)))
        return self.fc(pool(x))


class PositionConstant(nn.Module):
    """A constant for each position is added to every channel, in front of a padded convolution."""

    def __init__(self, c=8, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, c, 3, padding=1)
        self.register_buffer("grid", torch.linspace(-1, 1, 16).view(1, 1, 1, 16) * torch.ones(1, 1, 16, 1))
        self.offset = nn.Parameter(torch.full((1, 1, 16, 16), 0.1))
        self.conv2 = nn.Conv2d(c, 12, 3, padding=1)
        self.fc = nn.Linear(12, num_classes)

    def forward(self, x):
        x = F.relu(self.conv1(x)) + self.grid
        x = x + self.offset + 0.5
        return self.fc(pool(F.relu(self.conv2(x))))


class NoiseBuffer(nn.Module):
    """Fixed noise for each channel and position is added."""

    def __init__(self, c=8, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, c, 3, padding=1)
        self.register_buffer("noise", torch.randn(1, c, 16, 16) * 0.1)
        self.strength = nn.Parameter(torch.ones(c, 1, 1))
        self.conv2 = nn.Conv2d(c, 12, 3, padding=1)
        self.fc = nn.Linear(12, num_classes)

    def forward(self, x):
        x = F.leaky_relu(self.conv1(x) + self.strength * self.noise, 0.2)
        return self.fc(pool(F.leaky_relu(self.conv2(x), 0.2)))


class InPlace(nn.Module):
    def __init__(self, c=8, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, c, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(c)
        self.conv2 = nn.Conv2d(c, c, 3, padding=1)
        self.conv3 = nn.Conv2d(c, c, 3, padding=1)
        self.fc = nn.Linear(c, num_classes)

    def forward(self, x):
        x = self.bn1(self.conv1(x)).relu_()
        y = self.conv2(x)
        y += x
        y.relu_()
        z = self.conv3(y)
        z.add_(y).mul_(0.5)
        torch.relu_(z)
        return self.fc(pool(z))


class InPlaceSlice(nn.Module):
    """Some channels are changed in place through a slice."""

    def __init__(self, c=12, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, c, 3, padding=1)
        self.part = nn.Conv2d(3, 4, 1)
        self.conv2 = nn.Conv2d(c, 8, 3, padding=1)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x):
        y = self.conv1(x)
        y[:, :4] += self.part(x)
        y[:, -1] = 0.5
        return self.fc(pool(F.relu(self.conv2(F.relu(y)))))


# --------------------------------------------------------------------------- weights that are computed


class FunctionalBatchNorm(nn.Module):
    """Batch norm written by the user over F.batch_norm."""

    def __init__(self, c=12, num_classes=10):
        super().__init__()
        self.conv = nn.Conv2d(3, c, 3, padding=1, bias=False)
        self.gamma = nn.Parameter(torch.ones(c))
        self.beta = nn.Parameter(torch.zeros(c))
        self.register_buffer("mean", torch.zeros(c))
        self.register_buffer("var", torch.ones(c))
        self.fc = nn.Linear(c, num_classes)

    def forward(self, x):
        x = self.conv(x)
        x = F.batch_norm(x, self.mean, self.var, self.gamma, self.beta, training=self.training, momentum=0.1)
        return self.fc(pool(F.relu(x)))


class WSConv2d(nn.Conv2d):
    """Weight standardisation: the weight is normalised over its inputs before use."""

    def forward(self, x):
        weight = self.weight
        mean = weight.mean(dim=(1, 2, 3), keepdim=True)
        std = weight.std(dim=(1, 2, 3), keepdim=True)
        return F.conv2d(
            x, (weight - mean) / (std + 1e-5), self.bias, self.stride, self.padding, self.dilation, self.groups
        )


class WeightStandardised(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.conv1 = WSConv2d(3, 8, 3, padding=1)
        self.gn1 = nn.GroupNorm(4, 8)
        self.conv2 = WSConv2d(8, 12, 3, padding=1)
        self.gn2 = nn.GroupNorm(4, 12)
        self.fc = nn.Linear(12, num_classes)

    def forward(self, x):
        x = F.relu(self.gn1(self.conv1(x)))
        x = F.relu(self.gn2(self.conv2(x)))
        return self.fc(pool(x))


class WeightNorm(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.conv1 = parametrizations.weight_norm(nn.Conv2d(3, 8, 3, padding=1))
        self.conv2 = parametrizations.weight_norm(nn.Conv2d(8, 12, 3, padding=1))
        self.fc = nn.Linear(12, num_classes)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        return self.fc(pool(x))


class StandardisedConv(nn.Conv2d):
    """A weight that is standardised by filter with the function for batches (BiT, NFNet in timm)."""

    def __init__(self, *sizes, gain=False, **options):
        super().__init__(*sizes, **options)
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1)) if gain else None
        self.scale = self.weight[0].numel() ** -0.5

    def forward(self, x):
        gain = None if self.gain is None else (self.gain * self.scale).view(-1)
        weight = F.batch_norm(
            self.weight.reshape(1, self.out_channels, -1), None, None, weight=gain, training=True, momentum=0.0
        ).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class GroupNormReLU(nn.GroupNorm):
    """A norm with an activation (timm's GroupNormAct)."""

    def forward(self, x):
        return F.relu(F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps))


class StandardisedConvs(nn.Module):
    """Plain, grouped and depthwise convolutions with standardised weights."""

    def __init__(self, gain=False, num_classes=10):
        super().__init__()
        self.conv1 = StandardisedConv(3, 8, 3, padding=1, gain=gain)
        self.norm = nn.Identity() if gain else GroupNormReLU(4, 8)
        self.conv2 = StandardisedConv(8, 12, 3, padding=1, groups=4, gain=gain)
        self.conv3 = StandardisedConv(12, 12, 3, padding=1, groups=12, gain=gain)
        self.conv4 = StandardisedConv(12, 10, 1, gain=gain)
        self.head = nn.Linear(10, num_classes)

    def forward(self, x):
        x = F.relu(self.norm(self.conv1(x)))
        x = F.relu(self.conv4(F.relu(self.conv3(F.relu(self.conv2(x))))))
        return self.head(x.mean((2, 3)))


# --------------------------------------------------------------------------- sizes in code


class HardCodedView(nn.Module):
    """The width is written into the view."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.fc = nn.Linear(16, num_classes)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.adaptive_avg_pool2d(x, 1)
        x = x.view(-1, 16)
        return self.fc(x)


class HardCodedFlatten(nn.Module):
    """An adaptive pool, then a reshape to a product written in the code."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 5)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.pool = nn.AdaptiveAvgPool2d((2, 2))
        self.fc1 = nn.Linear(16 * 2 * 2, 20)
        self.fc2 = nn.Linear(20, num_classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = self.pool(F.relu(self.conv2(x)))
        x = x.reshape(-1, 16 * 2 * 2)
        return self.fc2(F.relu(self.fc1(x)))


class SizeAsNumber(nn.Module):
    """The channel count enters the arithmetic."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.fc = nn.Linear(16, num_classes)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = x * x.shape[1] ** -0.5
        return self.fc(pool(x))


class NumpySide(nn.Module):
    """Statistics are taken out through numpy for logging; they do not come back."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 12, 3, padding=1)
        self.fc = nn.Linear(12, num_classes)
        self.history = []

    def forward(self, x):
        x = F.relu(self.conv1(x))
        self.history.append(float(np.mean(x.detach().cpu().numpy())))
        x = F.relu(self.conv2(x))
        return self.fc(pool(x))


class NumpyFeedback(nn.Module):
    """A scale is computed in numpy and used in the network."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 12, 3, padding=1)
        self.fc = nn.Linear(12, num_classes)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        norm = np.mean(np.square(x.detach().cpu().numpy()), axis=1, keepdims=True)
        x = x / torch.from_numpy(np.sqrt(norm) + 1e-3).to(x)
        x = F.relu(self.conv2(x))
        return self.fc(pool(x))


# --------------------------------------------------------------------------- moving channels about


class ChannelOp(nn.Module):
    """conv -> some rearrangement of the channels -> conv -> linear."""

    def __init__(self, c=12, after=None, num_classes=10):
        super().__init__()
        after = c if after is None else after
        self.conv1 = nn.Conv2d(3, c, 3, padding=1)
        self.bn = nn.BatchNorm2d(c)
        self.conv2 = nn.Conv2d(after, 8, 3, padding=1)
        self.fc = nn.Linear(8, num_classes)

    def rearrange(self, x):
        raise NotImplementedError

    def forward(self, x):
        x = F.relu(self.bn(self.conv1(x)))
        x = self.rearrange(x)
        return self.fc(pool(F.relu(self.conv2(x))))


class FancyIndex(ChannelOp):
    def __init__(self):
        super().__init__(c=8, after=3)

    def rearrange(self, x):
        return x[:, [0, 2, 1]]


class IndexSelect(ChannelOp):
    def __init__(self):
        super().__init__(c=8)
        self.register_buffer("order", torch.tensor([3, 1, 0, 2, 7, 6, 4, 5]))

    def rearrange(self, x):
        return torch.index_select(x, 1, self.order)


class FlipChannels(ChannelOp):
    def rearrange(self, x):
        return x + x.flip(1)


class EverySecond(ChannelOp):
    def __init__(self):
        super().__init__(c=16, after=8)

    def rearrange(self, x):
        return x[:, ::2] + 0.5 * x[:, 1::2]


class NarrowChannels(ChannelOp):
    """The first channels are used, the rest are dropped."""

    def __init__(self):
        super().__init__(c=12, after=8)

    def rearrange(self, x):
        return x[:, :8]


class RollChannels(ChannelOp):
    def rearrange(self, x):
        return x - torch.roll(x, shifts=1, dims=1)


class PadChannels(ChannelOp):
    def __init__(self):
        super().__init__(c=8, after=12)

    def rearrange(self, x):
        return F.pad(x, (0, 0, 0, 0, 1, 3))


class CumsumChannels(ChannelOp):
    def rearrange(self, x):
        return torch.cumsum(x, dim=1)


class SortChannels(ChannelOp):
    def rearrange(self, x):
        return torch.sort(x, dim=1, descending=True).values


class FourierChannels(ChannelOp):
    """A complex spectrum over the channels; its magnitude is used."""

    def __init__(self):
        super().__init__(c=8, after=5)

    def rearrange(self, x):
        return torch.fft.rfft(x, dim=1).abs()


class RepeatChannels(ChannelOp):
    def __init__(self):
        super().__init__(c=6, after=12)

    def rearrange(self, x):
        return x.repeat(1, 2, 1, 1)


class NormaliseChannels(ChannelOp):
    """Unit length over the channels, as in metric learning."""

    def rearrange(self, x):
        return F.normalize(x, dim=1)


class SummedChannels(ChannelOp):
    """Numbers that are not zero where a channel is: a sum over channels depends on how many there are."""

    def rearrange(self, x):
        return x * torch.sigmoid(x).sum(1, keepdim=True) / 12


class ComparedPixels(ChannelOp):
    """As above, in a product of activations."""

    def rearrange(self, x):
        flat = x.flatten(2)
        found = torch.sigmoid(flat)
        return (flat @ (found.transpose(1, 2) @ found)).view_as(x) / 64


# --------------------------------------------------------------------------- other heads and layers


class RecurrentHead(nn.Module):
    """Convolutions, then an LSTM or a GRU over the columns of the feature map."""

    def __init__(self, kind="lstm", c=8, hidden=10, num_classes=6):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(8, c, 3, stride=2, padding=1)
        rnn = nn.LSTM if kind == "lstm" else nn.GRU
        self.rnn = rnn(c * 4, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, num_classes)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        n, c, h, w = x.shape
        x = x.permute(0, 3, 1, 2).reshape(n, w, c * h)
        out, _ = self.rnn(x)
        return self.fc(out[:, -1])


class TextClassifier(nn.Module):
    """Embedding, masked mean, two linear layers."""

    def __init__(self, vocab=30, dim=12, hidden=16, num_classes=4):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim, padding_idx=0)
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, num_classes)

    def forward(self, tokens):
        mask = (tokens != 0).unsqueeze(-1)
        x = self.embedding(tokens) * mask
        x = x.sum(1) / mask.sum(1).clamp(min=1)
        return self.fc2(F.relu(self.fc1(x)))


class BagClassifier(nn.Module):
    def __init__(self, vocab=30, dim=12, num_classes=4):
        super().__init__()
        self.bag = nn.EmbeddingBag(vocab, dim, mode="mean")
        self.fc1 = nn.Linear(dim, 16)
        self.fc2 = nn.Linear(16, num_classes)

    def forward(self, tokens):
        return self.fc2(torch.tanh(self.fc1(self.bag(tokens))))


class SwishFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s * (1 + x * (1 - s)))


class MemoryEfficientSwish(nn.Module):
    def forward(self, x):
        return SwishFunction.apply(x)


class CustomFunction(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            MemoryEfficientSwish(),
            nn.Conv2d(8, 12, 3, padding=1),
            MemoryEfficientSwish(),
        )
        self.fc = nn.Linear(12, num_classes)

    def forward(self, x):
        return self.fc(pool(self.features(x)))


class WhereBranches(nn.Module):
    """Two branches chosen element by element, with a learned threshold and some masking."""

    def __init__(self, c=8, num_classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, padding=1)
        self.a = nn.Conv2d(c, c, 3, padding=1)
        self.b = nn.Conv2d(c, c, 1)
        self.threshold = nn.Parameter(torch.zeros(1, c, 1, 1))
        self.fc = nn.Linear(c, num_classes)

    def forward(self, x):
        x = F.relu(self.stem(x))
        a, b = self.a(x), self.b(x)
        x = torch.where((a > 0) & (b < 1), a - self.threshold, b * torch.ones_like(a))
        x = torch.where(x.isfinite(), x, torch.zeros((), dtype=x.dtype, device=x.device))
        x = x.masked_fill(x < -1, -1.0).clamp(max=3.0)
        return self.fc(pool(x))


class BilinearLayer(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.left = nn.Linear(6, 8)
        self.right = nn.Linear(5, 12)
        self.bilinear = nn.Bilinear(8, 12, 10)
        self.fc = nn.Linear(10, num_classes)

    def forward(self, a, b):
        z = self.bilinear(F.relu(self.left(a)), F.relu(self.right(b)))
        return self.fc(F.relu(z))


class SoftmaxInside(nn.Module):
    """Class probabilities feed a second stage and are also returned."""

    def __init__(self, num_classes=6):
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, padding=1)
        self.first = nn.Linear(12, num_classes)
        self.second = nn.Linear(12 + num_classes, 16)
        self.out = nn.Linear(16, num_classes)

    def forward(self, x):
        x = pool(F.relu(self.conv(x)))
        coarse = F.softmax(self.first(x), dim=-1)
        x = F.relu(self.second(torch.cat([x, coarse], dim=-1)))
        return coarse, F.softmax(self.out(x), dim=-1)


class ExpertMixture(nn.Module):
    """A softmax gate weighs the outputs of several small experts."""

    def __init__(self, experts=3, hidden=10, num_classes=6):
        super().__init__()
        self.gate = nn.Linear(12, experts)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(12, hidden), nn.ReLU(), nn.Linear(hidden, num_classes)) for _ in range(experts)]
        )

    def forward(self, x):
        weights = torch.softmax(self.gate(x), dim=-1)
        outs = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return (outs * weights.unsqueeze(1)).sum(-1)


class Dropout2dNet(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.drop = nn.Dropout2d(0.3)
        self.conv2 = nn.Conv2d(8, 12, 3, padding=1)
        self.fc = nn.Linear(12, num_classes)

    def forward(self, x):
        x = self.drop(F.relu(self.conv1(x)))
        x = F.relu(F.dropout2d(self.conv2(x), 0.2, self.training))
        return self.fc(pool(x))


class BilinearPooling(nn.Module):
    """Second-order pooling: the products of all pairs of channels go into the classifier."""

    def __init__(self, c=8, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, c, 3, padding=1)
        self.fc = nn.Linear(c * c, num_classes)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        n, c, h, w = x.shape
        x = x.view(n, c, h * w)
        x = x @ x.transpose(1, 2) / (h * w)
        x = torch.sqrt(x + 1e-5)
        return self.fc(x.flatten(1))


class EinsumContraction(nn.Module):
    """Channels are contracted pixel by pixel; an activation follows."""

    def __init__(self, c=10, num_classes=6):
        super().__init__()
        self.a = nn.Conv2d(3, c, 3, padding=1)
        self.b = nn.Conv2d(3, c, 3, padding=1)
        self.mix = nn.Parameter(torch.randn(8, c) * 0.3)
        self.fc = nn.Linear(8 + 1, num_classes)

    def forward(self, x):
        a, b = F.relu(self.a(x)), torch.tanh(self.b(x))
        energy = torch.sigmoid(torch.einsum("nchw,nchw->nhw", a, b)).unsqueeze(1)
        mixed = F.relu(torch.einsum("nchw,kc->nkhw", a, self.mix))
        return self.fc(pool(torch.cat([mixed, energy], 1)))
