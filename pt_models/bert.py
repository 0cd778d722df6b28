"""BERT (Devlin et al. 2018), small: masked words and next sentence (6.5 million weights and 257 a word)."""

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from pt_models.gpt import attend, neutral

__all__ = ["build", "neutral"]

HIDDEN = -3e4  # a score whose exponential is 0, within the range of float16
EPS = 1e-12  # BERT's, of layer norms


class Block(nn.Module):
    """(n, T, width) and scores to add (n, 1, 1, T) -> (n, T, width); layer norm comes after each part."""

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
    """Tokens and segments (n, T), whole numbers -> logits {"words": (n, T, vocabulary), "next": (n, 2)}.

    Token 0 is padding, which nobody attends to; segments are 0 for sentence A and 1 for B; "next" is told by the first
    place. Logits of words are products with the tokens' embedding.
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
