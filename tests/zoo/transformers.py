"""Fully connected networks and transformers."""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn

# --------------------------------------------------------------------------- MLPs


class MLP(nn.Module):
    def __init__(self, sizes=(12, 24, 16, 10), batch_norm=False):
        super().__init__()
        layers = []
        for i, (a, b) in enumerate(itertools.pairwise(sizes)):
            layers.append(nn.Linear(a, b))
            if i < len(sizes) - 2:
                if batch_norm:
                    layers.append(nn.BatchNorm1d(b))
                layers.append(nn.ReLU())
        self.net = nn.Sequential(*layers)

    def forward(self, x):
        return self.net(x)


class MixerBlock(nn.Module):
    def __init__(self, tokens, dim, token_hidden, channel_hidden):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.token_mix = nn.Sequential(nn.Linear(tokens, token_hidden), nn.GELU(), nn.Linear(token_hidden, tokens))
        self.norm2 = nn.LayerNorm(dim)
        self.channel_mix = nn.Sequential(nn.Linear(dim, channel_hidden), nn.GELU(), nn.Linear(channel_hidden, dim))

    def forward(self, x):
        y = self.norm1(x).transpose(1, 2)
        x = x + self.token_mix(y).transpose(1, 2)
        return x + self.channel_mix(self.norm2(x))


class MLPMixer(nn.Module):
    def __init__(self, dim=12, depth=2, num_classes=10):
        super().__init__()
        self.embed = nn.Conv2d(3, dim, kernel_size=4, stride=4)
        self.blocks = nn.Sequential(*[MixerBlock(16, dim, 10, 24) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = self.norm(self.blocks(x))
        return self.head(x.mean(dim=1))


# --------------------------------------------------------------------------- vision transformers


class FusedAttention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        x = x.transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class SeparateAttention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(dim, dim, bias=False)
        self.to_v = nn.Linear(dim, dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def split_heads(self, x):
        b, n, _ = x.shape
        return x.view(b, n, self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.split_heads(self.to_q(x)), self.split_heads(self.to_k(x)), self.split_heads(self.to_v(x))
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        out = (attn @ v).transpose(1, 2).flatten(2)
        return self.to_out(out)


class ProductAttention(FusedAttention):
    """The width of the heads together is written as a product of attributes."""

    def forward(self, x):
        B, N, _ = x.shape
        q, k, v = self.qkv(x).view(B, N, 3 * self.num_heads * self.head_dim).chunk(3, dim=-1)
        q, k, v = (t.view(B, N, self.num_heads, self.head_dim).transpose(1, 2) for t in (q, k, v))
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, self.num_heads * self.head_dim))


class ViTBlock(nn.Module):
    def __init__(self, attention, dim, num_heads, mlp_dim):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(dim, mlp_dim), nn.GELU(), nn.Linear(mlp_dim, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class ViT(nn.Module):
    def __init__(
        self,
        attention=FusedAttention,
        image=16,
        patch=4,
        dim=24,
        depth=2,
        num_heads=4,
        mlp_dim=32,
        num_classes=10,
    ):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, kernel_size=patch, stride=patch)
        n = (image // patch) ** 2
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.empty(1, n + 1, dim).normal_(std=0.02))
        self.blocks = nn.Sequential(*[ViTBlock(attention, dim, num_heads, mlp_dim) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        cls = self.cls_token.expand(x.shape[0], -1, -1)
        x = torch.cat((cls, x), dim=1)
        x = x + self.pos_embed
        x = self.blocks(x)
        x = self.norm(x)
        return self.head(x[:, 0])


# --------------------------------------------------------------------------- decoders


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rope(x, cos, sin):
    return x * cos + rotate_half(x) * sin


class GroupedQueryAttention(nn.Module):
    """Grouped-query attention; keys and values are shared out by repeat_interleave or by expand and reshape."""

    def __init__(self, dim, n_heads, n_kv_heads, repeat):
        super().__init__()
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        self.n_rep = n_heads // n_kv_heads
        self.head_dim = dim // n_heads
        self.repeat = repeat
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def repeat_kv(self, x):
        if self.repeat == "interleave":
            return x.repeat_interleave(self.n_rep, dim=1)
        b, h, t, d = x.shape
        return x[:, :, None, :, :].expand(b, h, self.n_rep, t, d).reshape(b, h * self.n_rep, t, d)

    def forward(self, x, cos, sin, mask):
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(b, t, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(b, t, self.n_kv_heads, self.head_dim).transpose(1, 2)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        k, v = self.repeat_kv(k), self.repeat_kv(v)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.head_dim)
        scores = scores.masked_fill(~mask[:t, :t], float("-inf"))
        out = torch.matmul(F.softmax(scores, dim=-1), v)
        out = out.transpose(1, 2).contiguous().view(b, t, -1)
        return self.wo(out)


class SwiGLU(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class DecoderBlock(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads, hidden, repeat):
        super().__init__()
        self.attention_norm = RMSNorm(dim)
        self.attention = GroupedQueryAttention(dim, n_heads, n_kv_heads, repeat)
        self.ffn_norm = RMSNorm(dim)
        self.feed_forward = SwiGLU(dim, hidden)

    def forward(self, x, cos, sin, mask):
        h = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return h + self.feed_forward(self.ffn_norm(h))


class Decoder(nn.Module):
    """A llama-like decoder with tied embeddings."""

    def __init__(
        self,
        repeat="interleave",
        vocab=30,
        dim=24,
        depth=2,
        n_heads=4,
        n_kv_heads=2,
        hidden=20,
        max_len=16,
    ):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        head_dim = dim // n_heads
        self.blocks = nn.ModuleList([DecoderBlock(dim, n_heads, n_kv_heads, hidden, repeat) for _ in range(depth)])
        self.norm = RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.lm_head.weight = self.tok.weight
        freqs = 1.0 / (10000 ** (torch.arange(0, head_dim, 2).float() / head_dim))
        angles = torch.outer(torch.arange(max_len).float(), freqs)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.register_buffer("mask", torch.ones(max_len, max_len).tril().bool(), persistent=False)

    def forward(self, tokens):
        t = tokens.shape[1]
        x = self.tok(tokens)
        cos, sin = self.cos[:t], self.sin[:t]
        for block in self.blocks:
            x = block(x, cos, sin, self.mask)
        return self.lm_head(self.norm(x))


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head, block_size):
        super().__init__()
        assert n_embd % n_head == 0
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.n_head = n_head
        self.n_embd = n_embd
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class GPTMLP(nn.Module):
    def __init__(self, n_embd):
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 2 * n_embd)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(2 * n_embd, n_embd)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class GPTBlock(nn.Module):
    def __init__(self, n_embd, n_head, block_size):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head, block_size)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = GPTMLP(n_embd)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class NanoGPT(nn.Module):
    """With targets it also gives the loss."""

    def __init__(self, vocab=30, n_embd=24, n_head=4, n_layer=2, block_size=12):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab, n_embd),
                "wpe": nn.Embedding(block_size, n_embd),
                "h": nn.ModuleList([GPTBlock(n_embd, n_head, block_size) for _ in range(n_layer)]),
                "ln_f": nn.LayerNorm(n_embd),
            }
        )
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        _, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        logits = self.lm_head(x)
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


# --------------------------------------------------------------------------- built-in transformer layers


class EncoderStack(nn.Module):
    """nn.TransformerEncoder over a projected sequence."""

    def __init__(self, dim=16, num_classes=6):
        super().__init__()
        self.inp = nn.Linear(5, dim)
        layer = nn.TransformerEncoderLayer(dim, nhead=4, dim_feedforward=24, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x):
        return self.head(self.encoder(self.inp(x)).mean(dim=1))


class EncoderDecoder(nn.Module):
    """nn.Transformer, which compares the width of its inputs with its attribute."""

    def __init__(self, dim=16, num_classes=6):
        super().__init__()
        self.inp = nn.Linear(5, dim)
        self.transformer = nn.Transformer(dim, 4, 1, 1, dim_feedforward=24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x):
        x = self.inp(x)
        return self.head(self.transformer(x, x.flip(1)).mean(dim=1))


class PreNormEncoderStack(nn.Module):
    """Pre-norm encoder layers in a list, sequence first."""

    def __init__(self, dim=16, num_classes=6):
        super().__init__()
        self.inp = nn.Linear(5, dim)
        self.layers = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(
                    dim, nhead=2, dim_feedforward=24, dropout=0.0, activation="gelu", norm_first=True
                )
                for _ in range(2)
            ]
        )
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x):
        x = self.inp(x).transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[-1])


class MHABlock(nn.Module):
    """Self-attention and cross-attention with nn.MultiheadAttention."""

    def __init__(self, dim=16, num_heads=4, out=6):
        super().__init__()
        self.inp = nn.Linear(5, dim)
        self.mem = nn.Linear(7, dim)
        self.norm1 = nn.LayerNorm(dim)
        self.self_attn = nn.MultiheadAttention(dim, num_heads, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.cross_attn = nn.MultiheadAttention(dim, num_heads, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(dim, 24), nn.ReLU(), nn.Linear(24, dim))
        self.head = nn.Linear(dim, out)

    def forward(self, x, memory):
        x = self.inp(x)
        memory = self.mem(memory)
        h = self.norm1(x)
        x = x + self.self_attn(h, h, h, need_weights=False)[0]
        y, _ = self.cross_attn(self.norm2(x), memory, memory)
        x = x + y
        x = x + self.ffn(x)
        return self.head(x)


# --------------------------------------------------------------------------- parameters used functionally


class Conv1D(nn.Module):
    """The linear layer of GPT-2: the weight is (in, out)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.empty(nx, nf).normal_(std=0.2))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        size_out = (*x.size()[:-1], self.nf)
        x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return x.view(size_out)


class Conv1DFFN(nn.Module):
    def __init__(self, dim=12, hidden=24):
        super().__init__()
        self.ln = nn.LayerNorm(dim)
        self.c_fc = Conv1D(hidden, dim)
        self.c_proj = Conv1D(dim, hidden)

    def forward(self, x):
        h = self.c_fc(self.ln(x))
        h = 0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))))
        return x + self.c_proj(h)


class FunctionalLinear(nn.Module):
    """Weights held directly by the model and used through F.linear and matmul."""

    def __init__(self, din=12, hidden=16, out=10):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden, din))
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.mid = nn.Parameter(torch.empty(hidden, hidden))
        self.out = nn.Parameter(torch.empty(out, hidden))
        for p in (self.weight, self.mid, self.out):
            nn.init.xavier_uniform_(p)

    def forward(self, x):
        x = F.relu(F.linear(x, self.weight, self.bias))
        x = F.relu(x @ self.mid)
        return F.linear(x, self.out)


class EinsumFFN(nn.Module):
    def __init__(self, dim=12, hidden=20, out=6):
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(dim, hidden) / dim**0.5)
        self.b_in = nn.Parameter(torch.zeros(hidden))
        self.w_out = nn.Parameter(torch.randn(hidden, out) / hidden**0.5)

    def forward(self, x):
        h = torch.einsum("btd,df->btf", x, self.w_in) + self.b_in
        return torch.einsum("btf,fo->bto", F.gelu(h), self.w_out)


class EinsumAttention(nn.Module):
    """Attention whose projections carry a separate head axis."""

    def __init__(self, dim=12, heads=3, head_dim=6):
        super().__init__()
        self.wq = nn.Parameter(torch.randn(heads, dim, head_dim) / dim**0.5)
        self.wk = nn.Parameter(torch.randn(heads, dim, head_dim) / dim**0.5)
        self.wv = nn.Parameter(torch.randn(heads, dim, head_dim) / dim**0.5)
        self.wo = nn.Parameter(torch.randn(heads, head_dim, dim) / dim**0.5)
        self.scale = head_dim**-0.5

    def forward(self, x):
        q = torch.einsum("bnd,hde->bhne", x, self.wq)
        k = torch.einsum("bnd,hde->bhne", x, self.wk)
        v = torch.einsum("bnd,hde->bhne", x, self.wv)
        attention = (torch.einsum("bhie,bhje->bhij", q, k) * self.scale).softmax(-1)
        out = torch.einsum("bhij,bhje->bhie", attention, v)
        return x + torch.einsum("bhne,hed->bnd", out, self.wo)
