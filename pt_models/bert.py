"""BERT (Devlin et al. 2018), small: masked words and next sentence (6.5 million weights and 257 a word)."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from pt_models.gpt import attend, neutral

__all__ = ["blocks", "build", "neutral"]

HIDDEN = -3e4  # a score whose exponential is 0, in the range of float16
EPS = 1e-12  # of layer norms, as in BERT


class Block(nn.Module):
    """(n, T, width) and scores to add (n, 1, 1, T) -> (n, T, width); with layer norms after the residual sums."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(width, eps=EPS)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width, eps=EPS)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask) -> Tensor:
        qkv = self.qkv(x)
        x = self.norm1(x + self.dropout(self.out(attend(qkv, self.heads, attn_mask=mask.to(qkv.dtype)))))
        return self.norm2(x + self.dropout(self.fc2(F.gelu(self.fc1(x)))))


class BERT(nn.Module):
    """Tokens and segments (n, T), integers -> logits {"words": (n, T, vocabulary), "next": (n, 2)}.

    Token 0 is padding, which is masked in attention; segments are 0 for sentence A and 1 for B. "next" is computed from
    the first token. Logits of words are products with the token embeddings.
    """

    def __init__(self, length: int, vocabulary: int, width: int, depth: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.segment = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.transform = nn.Linear(width, width)
        self.transform_norm = nn.LayerNorm(width, eps=EPS)
        self.words = nn.Linear(width, vocabulary)
        self.words.weight = self.token.weight
        self.pooler = nn.Linear(width, width)
        self.next = nn.Linear(width, 2)

    def forward(self, tokens, segments) -> dict[str, Tensor]:
        mask = HIDDEN * (tokens == 0)[:, None, None]
        x = self.token(tokens) + self.position.weight + self.segment(segments)
        x = self.dropout(self.norm(x))
        for block in self.blocks:
            x = block(x, mask)
        words = self.words(self.transform_norm(F.gelu(self.transform(x))))
        return {"words": words, "next": self.next(self.pooler(x[:, 0]).tanh())}


def build(input_shape, num_classes, width: int = 256, depth: int = 8, heads: int = 8, dropout: float = 0.1) -> BERT:
    if not (isinstance(input_shape, dict) and set(input_shape) == {"tokens", "segments"}):
        raise ValueError(f"the BERT needs the inputs tokens and segments, not {input_shape}")
    if not (isinstance(num_classes, dict) and set(num_classes) == {"words", "next"}):
        raise ValueError(f"the BERT needs the labels words and next, not {num_classes}")
    if width % heads:
        raise ValueError(f"width {width} is no multiple of heads {heads}")
    (length,) = input_shape["tokens"]
    return BERT(length, num_classes["words"], width, depth, heads, dropout)


class Embed(nn.Module):
    """Tokens and segments (n, T) -> (n, T, width + 1): the part of BERT before its blocks.

    The last column holds the scores to add, so that a single tensor passes between blocks.
    """

    def __init__(self, model: BERT) -> None:
        super().__init__()
        self.token, self.position, self.segment = model.token, model.position, model.segment
        self.norm, self.dropout = model.norm, model.dropout

    def forward(self, tokens, segments) -> Tensor:
        x = self.token(tokens) + self.position.weight + self.segment(segments)
        return with_mask(self.dropout(self.norm(x)), HIDDEN * (tokens == 0))


class Inner(nn.Module):
    """A block on (n, T, width + 1)."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x) -> Tensor:
        mask = x[..., -1].contiguous()
        return with_mask(self.block(without_mask(x), mask[:, None, None]), mask)


class Head(nn.Module):
    """(n, T, width + 1) -> logits of words and of "next": the part of BERT after its blocks."""

    def __init__(self, model: BERT) -> None:
        super().__init__()
        self.transform, self.transform_norm, self.words = model.transform, model.transform_norm, model.words
        self.pooler, self.next = model.pooler, model.next

    def forward(self, x) -> dict[str, Tensor]:
        x = without_mask(x)
        words = self.words(self.transform_norm(F.gelu(self.transform(x))))
        return {"words": words, "next": self.next(self.pooler(x[:, 0]).tanh())}


def with_mask(x, mask) -> Tensor:
    return torch.cat([x, mask[..., None].to(x.dtype)], -1)


def without_mask(x) -> Tensor:
    return x[..., :-1].contiguous()  # contiguous: products of a strided tensor would have other bits


def blocks(model: BERT) -> list[nn.Module]:
    return [Embed(model), *map(Inner, model.blocks), Head(model)]
