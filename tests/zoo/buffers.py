"""Networks that create tensors with the size of another one, and write into them."""

import torch
import torch.nn.functional as F
from torch import nn


class StateSpace(nn.Module):
    """A selective scan with a state for each channel, whose last state goes into a cache (Mamba)."""

    def __init__(self, dim=5, inner=8, state=4, rank=3, num_classes=3):
        super().__init__()
        self.state, self.rank = state, rank
        self.in_proj = nn.Linear(dim, 2 * inner)
        self.conv = nn.Conv1d(inner, inner, 3, padding=2, groups=inner)
        self.x_proj = nn.Linear(inner, rank + 2 * state)
        self.dt_proj = nn.Linear(rank, inner)
        self.a_log = nn.Parameter(torch.rand(inner, state))
        self.skip = nn.Parameter(torch.ones(inner))
        self.out = nn.Linear(inner, num_classes)

    def forward(self, x):
        n = x.shape[1]
        x, gate = self.in_proj(x).chunk(2, -1)
        x = x.transpose(1, 2)
        cache = torch.zeros((*x.shape[:-1], 4), dtype=x.dtype, device=x.device)
        cache.copy_(x[..., -4:])
        x = F.silu(self.conv(x)[..., :n]) + cache.mean(-1, keepdim=True)
        dt, b, c = self.x_proj(x.transpose(1, 2)).split([self.rank, self.state, self.state], -1)
        dt = F.softplus(self.dt_proj(dt)).transpose(1, 2)
        decay = torch.exp(-torch.exp(self.a_log)[None, :, None] * dt[..., None])
        entering = dt[..., None] * b[:, None] * x[..., None]
        state = torch.zeros(x.shape[0], x.shape[1], self.state, dtype=x.dtype, device=x.device)
        outputs = []
        for i in range(n):
            state = decay[:, :, i] * state + entering[:, :, i]
            outputs.append((state @ c[:, i, :, None])[:, :, 0])
        last = torch.zeros_like(state)
        last.copy_(state)
        y = torch.stack(outputs, -1) + x * self.skip[:, None] + last.sum(-1)[..., None]
        return self.out(y.transpose(1, 2) * F.silu(gate))


class Preallocated(nn.Module):
    """The outputs for all tokens are written into a tensor that is created first."""

    def __init__(self, dim=8, num_classes=3):
        super().__init__()
        self.inp = nn.Linear(5, dim)
        self.layer = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, num_classes)

    def forward(self, x):
        x = self.inp(x)
        b, n, c = x.shape
        y = x.new_zeros(b, n, c)
        for i in range(n):
            y[:, i] = torch.tanh(self.layer(x[:, i] + y[:, i - 1]))
        return self.out(y)


class ChangedThroughView(nn.Module):
    """Half of the tokens are changed in place, through a view."""

    def __init__(self, dim=8, num_classes=3):
        super().__init__()
        self.inp = nn.Linear(5, dim)
        self.layer = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, num_classes)

    def forward(self, x):
        x = self.inp(x) * 1.0
        half = x[:, ::2]
        half += self.layer(F.relu(half))
        return self.out(x)


class CreatedWidth(nn.Module):
    """Ones as wide as the channels are concatenated to them, and a gate is expanded to their size."""

    def __init__(self, dim=8, num_classes=3):
        super().__init__()
        self.inp = nn.Linear(5, dim)
        self.gate = nn.Linear(dim, 1)
        self.out = nn.Linear(dim, num_classes)

    def forward(self, x):
        x = self.inp(x)
        b, n, c = x.shape
        x = x * torch.sigmoid(self.gate(x)).expand(b, n, c)
        x = torch.cat([torch.ones(b, 1, c, dtype=x.dtype, device=x.device), x], 1)
        return self.out(x)


class PartlyWritten(nn.Module):
    """Half of the tokens of a sum are written over with numbers that are not zero where a channel is absent."""

    def __init__(self, dim=8, num_classes=3):
        super().__init__()
        self.a = nn.Linear(5, dim)
        self.b = nn.Linear(5, dim)
        self.layer = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, num_classes)

    def forward(self, x):
        x = self.a(x) + self.b(x)
        y = x * 1.0
        y[:, ::2] = torch.sigmoid(self.layer(x[:, ::2]))
        return self.out(F.relu(y))


class ComputedSize(nn.Module):
    """A tensor is created with a size that is computed from that of another one."""

    def __init__(self, dim=8, num_classes=3):
        super().__init__()
        self.inp = nn.Linear(5, dim)
        self.out = nn.Linear(dim, num_classes)
        self.padded = nn.Linear(dim + 4, num_classes)

    def forward(self, x):
        y = self.inp(x)
        ones = torch.ones(*x.shape[:-1], y.size(-1) + 4, dtype=x.dtype, device=x.device)
        return self.out(y) + self.padded(ones)


class OuterProduct(nn.Module):
    """Every channel of one layer meets every channel of another, also where one of them is zero."""

    def __init__(self, dim=8, other=6, num_classes=3):
        super().__init__()
        self.a = nn.Linear(5, dim)
        self.b = nn.Linear(5, other)
        self.sums = nn.Linear(dim, num_classes)
        self.out = nn.Linear(dim * other, num_classes)

    def forward(self, x):
        a, b = self.a(x)[..., None], self.b(x)[..., None, :]
        return self.out(torch.maximum(a, b).flatten(-2)) + self.sums((a * b).sum(-1))
