"""A small decoder-only transformer: logits of the next token at every position (0.84 million weights on bytes)."""

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


def attend(qkv, heads: int, **mask) -> Tensor:
    """Query, key and value (n, T, 3 width), the last axis as (3, heads, width / heads) -> (n, T, width)."""
    n, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = qkv.view(n, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4).unbind()
    return F.scaled_dot_product_attention(q, k, v, **mask).transpose(1, 2).reshape(n, length, width)


class Block(nn.Module):
    """(n, T, width) -> the same shape; with layer norms before attention and MLP (Radford et al. 2019)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-5)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x) -> Tensor:
        x = x + self.dropout(self.out(attend(self.qkv(self.norm1(x)), self.heads, is_causal=True)))
        return x + self.dropout(self.fc2(F.gelu(self.fc1(self.norm2(x)))))


class GPT(nn.Module):
    """Tokens (n, T), integers -> logits (n, T, num_classes)."""

    def __init__(
        self, input_shape: tuple[int], num_classes: int, width: int, depth: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        if len(input_shape) != 1:
            raise ValueError(f"the GPT needs samples of one axis, tokens, not of shape {tuple(input_shape)}")
        if width % heads:
            raise ValueError(f"width {width} is no multiple of heads {heads}")
        self.tokens = nn.Embedding(num_classes, width)
        self.positions = nn.Embedding(input_shape[0], width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-5)

    def forward(self, x) -> Tensor:
        x = self.tokens(x) + self.positions.weight
        x = self.norm(self.blocks(self.dropout(x)))
        return F.linear(x, self.tokens.weight)


def build(input_shape, num_classes, width: int = 128, depth: int = 4, heads: int = 4, dropout: float = 0.0) -> GPT:
    return GPT(input_shape, num_classes, width, depth, heads, dropout)


class Embed(nn.Module):
    """Tokens (n, T) -> (n, T, width): the part of a GPT before its blocks."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.tokens, self.positions, self.dropout = model.tokens, model.positions, model.dropout

    def forward(self, x) -> Tensor:
        return self.dropout(self.tokens(x) + self.positions.weight)


class Head(nn.Module):
    """(n, T, width) -> logits: the part of a GPT after its blocks, with the token embeddings."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.norm, self.tokens = model.norm, model.tokens

    def forward(self, x) -> Tensor:
        return F.linear(self.norm(x), self.tokens.weight)


def blocks(model: GPT) -> list[nn.Module]:
    return [Embed(model), *model.blocks, Head(model)]


def neutral(model: nn.Module) -> dict[str, tuple]:
    table = {}
    for path, x in model.named_parameters():
        layer, _, kind = path.rpartition(".")
        if kind == "bias" or x.ndim == 1:
            table[path] = (f"{layer}.{'bias' if kind == 'bias' else 'scale'}", None, None, tuple(x.shape))
        elif isinstance(model.get_submodule(layer), nn.Embedding):
            table[path] = (f"{layer}.embedding", None, None, tuple(x.shape))
        else:
            table[path] = (f"{layer}.kernel", None, (1, 0), (x.shape[1], x.shape[0]))
    return table
