"""Networks whose residual sums are in the forward of the model, around modules that know no stream."""

import torch
import torch.nn.functional as F
from torch import nn


class PreNorm(nn.Module):
    """A module that normalises its input first, and adds nothing to it."""

    def __init__(self, dim, inner):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(dim), inner

    def forward(self, x):
        return self.inner(self.norm(x))


class Heads(nn.Module):
    """Self-attention in one module."""

    def __init__(self, dim, heads, causal=False, dropout=0.1):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(dropout))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


def feed_forward(dim, hidden):
    return nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, dim), nn.Dropout(0.1))


class ListedViT(nn.Module):
    """A vision transformer whose forward goes through a list of pairs (in the style of vit-pytorch)."""

    def __init__(self, dim=12, depth=3, heads=3, num_classes=5):
        super().__init__()
        self.embed = nn.Conv2d(3, dim, 4, 4)
        self.position, self.cls = nn.Parameter(torch.randn(1, 17, dim)), nn.Parameter(torch.randn(1, 1, dim))
        self.layers = nn.ModuleList(
            nn.ModuleList([PreNorm(dim, Heads(dim, heads)), PreNorm(dim, feed_forward(dim, 2 * dim))])
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, num_classes)

    def forward(self, images):
        x = self.embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.position
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return self.head(self.norm(x)[:, 0])


class ListedMixer(nn.Module):
    """An MLP-Mixer with convolutions over the patches, and norms in the forward of the model."""

    def __init__(self, dim=12, depth=2, num_classes=5):
        super().__init__()
        self.embed = nn.Conv2d(3, dim, 4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * depth))
        self.tokens = nn.ModuleList(
            nn.Sequential(nn.Conv1d(16, 8, 1), nn.GELU(), nn.Conv1d(8, 16, 1)) for _ in range(depth)
        )
        self.channels = nn.ModuleList(feed_forward(dim, 2 * dim) for _ in range(depth))
        self.head = nn.Linear(dim, num_classes)

    def forward(self, images):
        x = self.embed(images).flatten(2).transpose(1, 2)
        for i, (tokens, channels) in enumerate(zip(self.tokens, self.channels, strict=True)):
            x = x + tokens(self.norms[2 * i](x))
            x = x + channels(self.norms[2 * i + 1](x))
        return self.head(x.mean(1))


class SummedConvNet(nn.Module):
    """A convolutional network without block modules: one branch in one module, one of several with a functional ReLU,
    one that is scaled, and one between them that changes the width."""

    def __init__(self, width=8, num_classes=5):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.branch = nn.Sequential(
            *(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 12, 3, padding=1)),
            *(nn.BatchNorm2d(12), nn.ReLU(inplace=True), nn.Conv2d(12, width, 3, padding=1)),
        )
        self.conv1, self.bn1 = nn.Conv2d(width, 10, 3, padding=1), nn.BatchNorm2d(10)
        self.conv2, self.bn2 = nn.Conv2d(10, width, 3, padding=1), nn.BatchNorm2d(width)
        self.down = nn.Conv2d(width, 12, 3, stride=2, padding=1)
        self.last = nn.Sequential(nn.Conv2d(12, 12, 3, padding=1, groups=12), nn.Conv2d(12, 12, 1))
        self.gamma = nn.Parameter(torch.rand(12, 1, 1))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(12, num_classes)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.branch(x)
        x = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + x)
        x = F.relu(self.down(x))
        x = x + self.drop(self.gamma * self.last(x))
        return self.head(x.mean((2, 3)))


class SummedGPT(nn.Module):
    """A language model without block modules: norms, dropout and sums are in its forward."""

    def __init__(self, vocab=30, dim=12, depth=3, heads=3, length=16):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.ln_1, self.ln_2 = (nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth)) for _ in range(2))
        self.attn = nn.ModuleList(Heads(dim, heads, causal=True) for _ in range(depth))
        self.mlp = nn.ModuleList(feed_forward(dim, 3 * dim) for _ in range(depth))
        self.drop, self.ln_f, self.head = nn.Dropout(0.1), nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.drop(self.wte(tokens) + self.wpe.weight[: tokens.shape[1]])
        for ln_1, attn, ln_2, mlp in zip(self.ln_1, self.attn, self.ln_2, self.mlp, strict=True):
            x = x + F.dropout(attn(ln_1(x)), 0.1, self.training)
            x = x + mlp(ln_2(x))
        return self.head(self.ln_f(x))
