"""Attention as the models of torchvision, timm and transformers write it, each in one small network."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    """One attention layer with a residual connection, without normalisation."""

    def __init__(self, attention, channels=5, dim=12, num_classes=3):
        super().__init__()
        self.inp = nn.Linear(channels, dim)
        self.attention = attention(dim)
        self.out = nn.Linear(dim, num_classes)

    def forward(self, x):
        x = self.inp(x)
        y = self.attention(x)
        y, *state = y if isinstance(y, tuple) else (y,)
        x = self.out(F.gelu(x + y))
        return (x, *state) if state else x


class ComparesHeadWidth(nn.Module):
    """Grouped queries (Llama, Mistral, Qwen): the code compares the width of the heads to choose a kernel."""

    def __init__(self, dim, heads=4, groups=2, width=6):
        super().__init__()
        self.repeats, self.width = heads // groups, width
        self.q_proj = nn.Linear(dim, heads * width)
        self.k_proj = nn.Linear(dim, groups * width)
        self.v_proj = nn.Linear(dim, groups * width)
        self.o_proj = nn.Linear(heads * width, dim)

    def forward(self, x):
        shape = (*x.shape[:-1], -1, self.width)
        q, k, v = (proj(x).view(shape).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if not (k.shape[-1] == v.shape[-1] <= 256 and v.size(-1) >= 2):
            raise ValueError("no kernel for this width")
        scale = q.shape[-1] ** -0.5
        y = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(*x.shape[:-1], -1))


class SharedKeys(nn.Module):
    """All heads of queries share one head of keys and values, taken from the end of one tensor (Falcon)."""

    def __init__(self, dim, heads=4, width=3):
        super().__init__()
        self.heads, self.width = heads, width
        self.qkv = nn.Linear(dim, (heads + 2) * width)
        self.proj = nn.Linear(heads * width, dim)

    def forward(self, x):
        b, n, _ = x.shape
        qkv = self.qkv(x).view(b, n, self.heads + 2, self.width)
        q, k, v = (t.transpose(1, 2) for t in (qkv[..., :-2, :], qkv[..., [-2], :], qkv[..., [-1], :]))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.view(b, self.heads, n, self.width).permute(0, 2, 1, 3)
        return self.proj(y.reshape(b, n, self.heads * self.width))


@dataclass
class HeadsConfig:
    dim: int
    heads: int = 4
    groups: int = 2


class ConfiguredHeads(nn.Module):
    """The forward reads the number of heads from a configuration that all layers share (Phi-3, nanoGPT)."""

    def __init__(self, config, width=4):
        super().__init__()
        self.config, self.width, self.groups = config, width, config.groups
        self.qkv = nn.Linear(config.dim, (config.heads + 2 * config.groups) * width)
        self.proj = nn.Linear(config.heads * width, config.dim)

    def forward(self, x):
        shape = (*x.shape[:-1], -1, self.width)
        start = self.config.heads * self.width
        end = start + self.groups * self.width
        qkv = self.qkv(x)
        q, k, v = (t.view(shape).transpose(1, 2) for t in (qkv[..., :start], qkv[..., start:end], qkv[..., end:]))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return x + self.proj(y.transpose(1, 2).reshape(*x.shape[:-1], -1))


def configured_layers(dim):
    config = HeadsConfig(dim)
    return nn.Sequential(ConfiguredHeads(config), ConfiguredHeads(config))


class Indexed(nn.Module):
    """Queries, keys and values taken from one tensor by index (torchvision's Swin, CaiT)."""

    def __init__(self, dim, heads=4, width=3):
        super().__init__()
        self.heads, self.width = heads, width
        self.qkv = nn.Linear(dim, 3 * heads * width)
        self.proj = nn.Linear(heads * width, dim)

    def forward(self, x):
        b, n, _ = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, self.width).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = ((q * self.width**-0.5) @ k.transpose(-2, -1)).softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).flatten(2))


class InputWidth(nn.Module):
    """The width of the input is that of all heads together (timm, torchvision's Swin, PVT)."""

    def __init__(self, dim, heads=4):
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = ((q * (c // self.num_heads) ** -0.5) @ k.transpose(-2, -1)).softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))


class OneHead(nn.Module):
    """Attention of a stage with a single head, whose scale is that of its channels (PVT v2, Twins)."""

    def __init__(self, dim, heads=1):
        super().__init__()
        self.num_heads, self.head_dim = heads, dim // heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q = self.q(x).reshape(b, n, self.num_heads, -1).transpose(1, 2)
        k, v = self.kv(x).reshape(b, -1, 2, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(b, n, c))


class ScaledHead(nn.Module):
    """A single head without a dimension for heads, a mask, and a scale that is given."""

    def __init__(self, dim, width=10, outputs=7):
        super().__init__()
        self.scale = width**-0.5
        self.q = nn.Linear(dim, width)
        self.k = nn.Linear(dim, width)
        self.v = nn.Linear(dim, outputs)
        self.proj = nn.Linear(outputs, dim)

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        y = F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), mask, scale=self.scale)
        return self.proj(y)


class JoinedBias(nn.Module):
    """Queries and values have a bias, keys have zeros (BEiT, EVA-02, Swin v2)."""

    def __init__(self, dim, heads=4, width=3):
        super().__init__()
        self.width = width
        self.qkv = nn.Linear(dim, 3 * heads * width, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(heads * width))
        self.v_bias = nn.Parameter(torch.zeros(heads * width))
        self.register_buffer("k_bias", torch.zeros(heads * width), persistent=False)
        self.proj = nn.Linear(heads * width, dim)

    def forward(self, x):
        b, n, _ = x.shape
        qkv = F.linear(x, self.qkv.weight, torch.cat((self.q_bias, self.k_bias, self.v_bias)))
        q, k, v = qkv.reshape(b, n, 3, -1, self.width).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, -1))


class FlatBatchNorm(nn.Module):
    """A linear layer with batch normalisation over tokens (LeViT)."""

    def __init__(self, fan_in, fan_out):
        super().__init__()
        self.linear = nn.Linear(fan_in, fan_out, bias=False)
        self.bn = nn.BatchNorm1d(fan_out)

    def forward(self, x):
        x = self.linear(x)
        return self.bn(x.flatten(0, 1)).reshape_as(x)


class CachedBias(nn.Module):
    """A bias for each head and distance, cached in evaluation mode until `train()` is called (LeViT, TinyViT)."""

    def __init__(self, dim, tokens=6, heads=4, width=3):
        super().__init__()
        self.heads, self.width = heads, width
        self.qkv = FlatBatchNorm(dim, 3 * heads * width)
        self.proj = FlatBatchNorm(heads * width, dim)
        self.attention_biases = nn.Parameter(torch.zeros(heads, tokens))
        positions = torch.arange(tokens)
        self.register_buffer("distances", (positions[:, None] - positions).abs(), persistent=False)
        self.cached = {}

    def train(self, mode=True):
        super().train(mode)
        if mode:
            self.cached = {}
        return self

    def biases(self, device):
        if self.training:
            return self.attention_biases[:, self.distances]
        if device not in self.cached:
            self.cached[device] = self.attention_biases[:, self.distances]
        return self.cached[device]

    def forward(self, x):
        b, n, _ = x.shape
        qkv = self.qkv(x).view(b, n, self.heads, -1).split([self.width, self.width, self.width], dim=3)
        q, k, v = (t.permute(0, 2, 1, 3) for t in qkv)
        attn = q @ k.transpose(-2, -1) * self.width**-0.5 + self.biases(x.device)
        y = (attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, self.heads * self.width)
        return self.proj(F.hardswish(y))


class BiasTable(nn.Module):
    """A table of biases by relative position, with a column for each head, and a mask (Swin, BEiT)."""

    def __init__(self, dim, tokens=6, heads=4, width=3, fused=True):
        super().__init__()
        self.heads, self.width, self.fused = heads, width, fused
        self.qkv = nn.Linear(dim, 3 * heads * width)
        self.proj = nn.Linear(heads * width, dim)
        self.table = nn.Parameter(torch.zeros(2 * tokens - 1, heads))
        positions = torch.arange(tokens)
        self.register_buffer("index", positions[:, None] - positions + tokens - 1)
        self.register_buffer("window", torch.where((positions[:, None] - positions).abs() > 3, -100.0, 0.0))

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, -1, self.width).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias + self.window)
        else:
            attn = q @ k.transpose(-2, -1) + bias
            attn = attn.view(b, 1, self.heads, n, n) + self.window[None, None, None]
            y = attn.view(-1, self.heads, n, n).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).flatten(2))


class BucketEmbedding(nn.Module):
    """Two layers that share an embedding of distances, one column for each head (T5)."""

    def __init__(self, dim, tokens=6, heads=4, width=3):
        super().__init__()
        self.width = width
        self.distances = nn.Embedding(tokens, heads)
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * heads * width) for _ in range(2))
        self.proj = nn.ModuleList(nn.Linear(heads * width, dim) for _ in range(2))

    def forward(self, x):
        b, n, _ = x.shape
        positions = torch.arange(n, device=x.device)
        bias = self.distances((positions[:, None] - positions).abs()).permute(2, 0, 1).unsqueeze(0)
        for qkv, proj in zip(self.qkv, self.proj, strict=True):
            q, k, v = (t.view(b, n, -1, self.width).transpose(1, 2) for t in qkv(x).chunk(3, -1))
            x = x + proj(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))
        return x


class ZeroBias(nn.Module):
    """A bias of zeros for each head is created, and a mask is added to it (T5's attention between two sequences)."""

    def __init__(self, dim, heads=4, width=3):
        super().__init__()
        self.heads, self.width = heads, width
        self.qkv = nn.Linear(dim, 3 * heads * width)
        self.proj = nn.Linear(heads * width, dim)

    def forward(self, x):
        b, n, _ = x.shape
        bias = torch.zeros((1, self.heads, n, n), dtype=x.dtype, device=x.device)
        bias = bias + torch.full((n, n), -1.0, dtype=x.dtype, device=x.device).triu(1)[None, None]
        q, k, v = (t.view(b, n, -1, self.width).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))


class AddedSlopes(nn.Module):
    """Scores to which a slope of its own is added for every head, computed from their number (Bloom)."""

    def __init__(self, dim, heads=3, width=4):
        super().__init__()
        self.heads, self.width, self.scale = heads, width, width**-0.5
        self.qkv = nn.Linear(dim, 3 * heads * width)
        self.proj = nn.Linear(heads * width, dim)

    def forward(self, x):
        b, n, _ = x.shape
        slopes = torch.tensor([2.0**-i for i in range(self.heads)], dtype=x.dtype, device=x.device).repeat(b)
        added = slopes[:, None, None] * torch.arange(n, device=x.device)
        qkv = self.qkv(x).view(b, n, self.heads, 3, self.width)
        q, k, v = (qkv[..., i, :].transpose(1, 2).reshape(b * self.heads, -1, self.width) for i in range(3))
        scores = added.baddbmm(q, k.transpose(1, 2), alpha=self.scale).view(b, self.heads, n, n).softmax(-1)
        y = torch.bmm(scores.view(b * self.heads, n, n), v).view(b, self.heads, n, self.width)
        return self.proj(y.transpose(1, 2).reshape(b, n, self.heads * self.width))


class ShiftedWindow(Indexed):
    """A mask is made from the tensor that is masked, with its type and place (torchvision's Swin)."""

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, self.width).permute(2, 0, 3, 1, 4)
        regions = x.new_zeros(n)
        regions[n // 2 :] = 1
        apart = regions[:, None] - regions
        attn = q @ k.transpose(-2, -1) + apart.masked_fill(apart != 0, -100.0)
        return self.proj((attn.softmax(-1) @ v).transpose(1, 2).flatten(2))


class ComputedBias(nn.Module):
    """A layer computes a bias for each head from constant coordinates; keys have no bias (Swin V2, ConViT)."""

    def __init__(self, dim, tokens=6, heads=4, width=3):
        super().__init__()
        self.heads, self.width = heads, width
        self.qkv = nn.Linear(dim, 3 * heads * width)
        self.proj = nn.Linear(heads * width, dim)
        self.bias = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, heads, bias=False))
        positions = torch.arange(tokens, dtype=torch.float32)
        self.register_buffer("distances", (positions[:, None] - positions)[..., None])
        self.gate = nn.Parameter(torch.zeros(heads))

    def forward(self, x):
        b, n, _ = x.shape
        qkv_bias = self.qkv.bias.clone()
        length = qkv_bias.numel() // 3
        qkv_bias[length : 2 * length].zero_()
        qkv = F.linear(x, self.qkv.weight, qkv_bias)
        q, k, v = qkv.reshape(b, n, 3, self.heads, self.width).permute(2, 0, 3, 1, 4)
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        gate = torch.sigmoid(self.gate).view(1, -1, 1, 1)
        attn = (1.0 - gate) * attn.softmax(-1) + gate * self.bias(self.distances).permute(2, 0, 1).softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).flatten(2))


class ChannelAttention(nn.Module):
    """Attention between the channels of a head, over all tokens (XCiT, DaViT, EdgeNeXt)."""

    def __init__(self, dim, heads=4, width=3):
        super().__init__()
        self.heads, self.width = heads, width
        self.qkv = nn.Linear(dim, 3 * heads * width)
        self.proj = nn.Linear(heads * width, dim)
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, self.width).permute(2, 0, 3, 4, 1)
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * self.temperature
        return self.proj((attn.softmax(-1) @ v).permute(0, 3, 1, 2).reshape(b, n, -1))


class InterleavedRotation(nn.Module):
    """Pairs of neighbouring features of each head are rotated by the token's position (EVA-02, RoFormer)."""

    def __init__(self, dim, heads=4, width=4):
        super().__init__()
        self.heads, self.width = heads, width
        self.qkv = nn.Linear(dim, 3 * heads * width)
        self.proj = nn.Linear(heads * width, dim)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        angles = torch.arange(n, device=x.device, dtype=x.dtype)[:, None] * torch.tensor([1.0, 1.0, 0.1, 0.1]).to(x)
        q, k = (t * angles.cos() + self.rotated(t) * angles.sin() for t in (q, k))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, -1))

    @staticmethod
    def rotated(t):
        return torch.stack([-t[..., 1::2], t[..., ::2]], -1).reshape(t.shape)


class ComplexRotation(nn.Module):
    """Pairs of neighbouring features are rotated as complex numbers (Llama as Meta wrote it)."""

    def __init__(self, dim, heads=4, width=4):
        super().__init__()
        self.heads, self.width = heads, width
        self.q, self.k, self.v = (nn.Linear(dim, heads * width) for _ in range(3))
        self.proj = nn.Linear(heads * width, dim)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (layer(x).view(b, n, self.heads, self.width) for layer in (self.q, self.k, self.v))
        angles = torch.arange(n, device=x.device, dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1]).to(x)
        turns = torch.polar(torch.ones_like(angles), angles).view(1, n, 1, self.width // 2)
        q, k = (torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2)) * turns for t in (q, k))
        q, k = (torch.view_as_real(t).flatten(3) for t in (q, k))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.proj(y.transpose(1, 2).reshape(b, n, -1))


class HeadParameters(nn.Module):
    """Parameters with entries for every head: scales, a bias, and one more score (DeBERTa, GAT, gpt-oss)."""

    def __init__(self, dim, heads=4, width=3):
        super().__init__()
        self.heads, self.width = heads, width
        self.qkv = nn.Linear(dim, 3 * heads * width, bias=False)
        self.proj = nn.Linear(heads * width, dim)
        self.q_scale, self.k_scale = nn.Parameter(torch.ones(heads, 1, width)), nn.Parameter(torch.ones(heads, 1, 1))
        self.v_bias, self.sinks = nn.Parameter(torch.zeros(heads * width)), nn.Parameter(torch.zeros(heads))

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, self.heads, self.width).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        v = v + self.v_bias.view(1, 1, self.heads, self.width).transpose(1, 2)
        scores = (q * self.q_scale) @ (k * self.k_scale).transpose(-2, -1)
        scores = scores + torch.ones(n, n).to(x).triu(1) * -1e4
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(b, -1, n, -1)
        scores = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return self.proj((scores @ v).transpose(1, 2).reshape(b, n, -1))


class InterleavedGate(nn.Module):
    """A gate in every second feature (gpt-oss)."""

    def __init__(self, dim, hidden=8):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        x = self.up(x)
        return self.down(x[..., ::2] * x[..., 1::2].sigmoid())


class BatchedExperts(nn.Module):
    """Experts whose weights are one parameter, all of them computed (Llama 4)."""

    def __init__(self, dim, experts=3, hidden=8):
        super().__init__()
        self.router = nn.Linear(dim, experts)
        self.up = nn.Parameter(torch.randn(experts, dim, 2 * hidden) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, hidden, dim) * 0.3)

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        gates = self.router(tokens).softmax(-1)
        gate, up = torch.bmm(tokens.expand(len(self.up), -1, -1), self.up).chunk(2, -1)
        y = torch.bmm(up * F.silu(gate), self.down) * gates.t()[..., None]
        return y.sum(0).view(x.shape)


class WindowsAfterHeads(nn.Module):
    """Attention in windows, which are a dimension after that of the heads (Hiera, NesT)."""

    def __init__(self, dim, heads=4, width=3, windows=2):
        super().__init__()
        self.heads, self.width, self.windows = heads, width, windows
        self.qkv = nn.Linear(dim, 3 * heads * width)
        self.proj = nn.Linear(heads * width, dim)

    def forward(self, x):
        b, n, _ = x.shape
        qkv = self.qkv(x).reshape(b, self.windows, n // self.windows, 3, self.heads, self.width)
        q, k, v = qkv.permute(3, 0, 4, 1, 2, 5).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.permute(0, 2, 3, 4, 1).reshape(b, n, -1))


class ShapeOfBefore(nn.Module):
    """Tokens are flattened, and take the shape back that they had before, as one object (OPT)."""

    def __init__(self, dim=12, num_classes=3):
        super().__init__()
        self.inp = nn.Linear(5, dim)
        self.up = nn.Linear(dim, 24)
        self.down = nn.Linear(24, dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x):
        x = self.inp(x)
        shape = x.shape
        x = x.reshape(-1, x.size(-1))
        return self.head((x + self.down(F.relu(self.up(x)))).view(shape))


class BiasShape(nn.Module):
    """A table of biases takes a shape that a tuple of the module has, with the number of heads (CoAtNet, MaxViT)."""

    def __init__(self, dim, tokens=6, heads=4, width=3):
        super().__init__()
        self.heads, self.width = heads, width
        self.qkv = nn.Linear(dim, 3 * heads * width)
        self.proj = nn.Linear(heads * width, dim)
        self.table = nn.Parameter(torch.zeros(2 * tokens - 1, heads))
        self.bias_shape = (tokens, tokens, heads)
        positions = torch.arange(tokens)
        self.register_buffer("index", positions[:, None] - positions + tokens - 1, persistent=False)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, self.width).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.view(-1)].view(self.bias_shape).permute(2, 0, 1)
        y = (q @ k.transpose(-2, -1) + bias.unsqueeze(0)).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).flatten(2))


class UpcastNorm(nn.Module):
    """A network whose norms compute in float32, whatever the type of the network (Llama and its relatives)."""

    def __init__(self, dim=12, num_classes=3):
        super().__init__()
        self.inp = nn.Linear(5, dim)
        self.weight = nn.Parameter(torch.ones(dim))
        self.hidden = nn.Linear(dim, 24)
        self.out = nn.Linear(24, num_classes)

    def forward(self, x):
        x = self.inp(x)
        y = x.to(torch.float32)
        y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return self.out(F.silu(self.hidden(y * self.weight).float()).to(x.dtype))


class ClassAttention(nn.Module):
    """Attention of the class token to all tokens (CaiT)."""

    def __init__(self, dim, heads=4, width=3):
        super().__init__()
        self.heads, self.width = heads, width
        self.q = nn.Linear(dim, heads * width)
        self.k = nn.Linear(dim, heads * width)
        self.v = nn.Linear(dim, heads * width)
        self.proj = nn.Linear(heads * width, dim)

    def forward(self, x, token):
        b = x.shape[0]
        x = torch.cat((token, x), 1)
        q = self.q(x[:, 0]).unsqueeze(1).reshape(b, 1, self.heads, self.width).permute(0, 2, 1, 3)
        k, v = (layer(x).reshape(b, -1, self.heads, self.width).permute(0, 2, 1, 3) for layer in (self.k, self.v))
        return token + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, 1, -1))


class ClassToken(nn.Module):
    """A class token that is expanded and given to the modules that change it."""

    def __init__(self, dim=12, num_classes=3):
        super().__init__()
        self.inp = nn.Linear(5, dim)
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.layers = nn.ModuleList(ClassAttention(dim) for _ in range(2))
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x):
        x, token = self.inp(x), self.token.expand(x.shape[0], -1, -1)
        for layer in self.layers:
            token = layer(x, token)
        return self.head(token[:, 0])


class LearnedQueries(nn.Module):
    """A residual stream that begins with parameters, which a norm or a layer reads first (Perceiver, Q-Former)."""

    def __init__(self, dim=12, normed=True, num_classes=3):
        super().__init__()
        self.inp = nn.Linear(5, dim)
        self.queries = nn.Parameter(torch.randn(4, dim))
        self.norm = nn.LayerNorm(dim) if normed else nn.Identity()
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 24), nn.GELU(), nn.Linear(24, dim))
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x):
        x = self.inp(x)
        queries = self.queries.expand(len(x), -1, -1)
        scores = self.q(self.norm(queries)) @ self.k(x).transpose(1, 2)
        queries = queries + scores.softmax(-1) @ self.v(x)
        return self.head((queries + self.mlp(queries)).mean(1))


class ResizedPositions(nn.Module):
    """A position embedding that is resized, and added to tokens and to the class token (DINO, PVT)."""

    def __init__(self, dim=12, num_classes=3):
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 2, 2)
        self.token = nn.Parameter(torch.randn(1, 1, dim))
        self.positions = nn.Parameter(torch.randn(1, 1 + 9, dim))
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 24), nn.GELU(), nn.Linear(24, dim))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, num_classes)

    def forward(self, x):
        x = self.patches(x)
        grid = self.positions[:, 1:].transpose(1, 2).unflatten(2, (3, 3))
        grid = F.interpolate(grid, size=x.shape[2:], mode="bicubic")
        token = (self.token + self.positions[:, :1]).expand(len(x), -1, -1)
        x = torch.cat([token, (x + grid).flatten(2).transpose(1, 2)], 1)
        return self.head(self.norm(x + self.mlp(x))[:, 0])


class FlatNormStream(nn.Module):
    """Residual layers that normalise in two dimensions and take their shape from before."""

    def __init__(self, dim=12, depth=2, num_classes=3):
        super().__init__()
        self.stem = FlatBatchNorm(5, dim)
        self.layers = nn.ModuleList(
            nn.Sequential(FlatBatchNorm(dim, 2 * dim), nn.Hardswish(), FlatBatchNorm(2 * dim, dim))
            for _ in range(depth)
        )
        self.gate = nn.Linear(dim, 1)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        x = x * torch.sigmoid(self.gate(x))
        return self.head(x.mean(1))


class ExpandedGate(nn.Module):
    """A map with one channel scales every channel, and so does a constant; both are expanded first."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.gate = nn.Conv2d(8, 1, 7, padding=3)
        self.conv2 = nn.Conv2d(8, 12, 3, padding=1)
        self.head = nn.Linear(12, num_classes)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = x * torch.sigmoid(self.gate(x)).expand_as(x)
        ramp = torch.linspace(0, 1, x.shape[-1], device=x.device, dtype=x.dtype)
        x = F.relu(self.conv2(x * ramp.view(1, 1, 1, -1).expand_as(x)))
        return self.head(x.mean((2, 3)))


class MixedKernels(nn.Module):
    """Depthwise convolutions of several sizes on parts of the channels; the widths are in a list or tuple (MixNet)."""

    def __init__(self, kind, dim=12, num_classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, dim, 3, padding=1)
        self.splits = kind((dim // 2, dim // 4, dim - dim // 2 - dim // 4))
        self.kernels = nn.ModuleList(
            nn.Conv2d(c, c, k, padding=k // 2, groups=c) for c, k in zip(self.splits, (1, 3, 5), strict=True)
        )
        self.last = nn.Conv2d(dim, dim, 1)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x):
        parts = torch.split(F.relu(self.stem(x)), self.splits, 1)
        x = torch.cat([kernel(part) for kernel, part in zip(self.kernels, parts, strict=True)], 1)
        return self.head(F.relu(self.last(x)).mean((2, 3)))


class KeyValueCache:
    def __init__(self):
        self.layers = []

    def update(self, keys, values):
        self.layers.append((keys, values))
        return keys, values


class Cached(Indexed):
    """A decoder that also returns its keys and values, in a cache."""

    def forward(self, x):
        b, n, _ = x.shape
        cache = KeyValueCache()
        q, k, v = (t.view(b, n, -1, self.width).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        k, v = cache.update(k, v)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2)), cache
