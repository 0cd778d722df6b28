"""A classifier for texts of any length: a small transformer, or with depth=0 the mean of the token embeddings."""

import torch.nn as nn
from torch import Tensor

from pt_models.bert import EPS, HIDDEN, Block
from pt_models.gpt import neutral

__all__ = ["build", "neutral"]


class TextClassifier(nn.Module):
    """Tokens (n, T), integers, and mask (n, T), true for tokens of the text -> logits (n, num_classes).

    The mean over a text's tokens is classified. Without blocks, the order of tokens has no effect.
    """

    def __init__(
        self, count: int, limit: int, num_classes: int, width: int, depth: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(count, width)
        if depth:
            self.position = nn.Embedding(limit, width)
            self.norm = nn.LayerNorm(width, eps=EPS)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.head = nn.Linear(width, num_classes)

    def forward(self, tokens, mask) -> Tensor:
        x = self.token(tokens)
        if len(self.blocks):
            x = self.norm(x + self.position.weight[: x.shape[1]])
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, HIDDEN * ~mask[:, None, None])
        shown = mask[..., None].to(x.dtype)
        return self.head((x * shown).sum(1) / shown.sum(1).clamp(min=1))


def build(
    input_shape,
    num_classes,
    vocabulary_size: int = 0,
    max_length: int = 0,
    width: int = 64,
    depth: int = 1,
    heads: int = 4,
    dropout: float = 0.1,
) -> TextClassifier:
    if not (isinstance(input_shape, dict) and set(input_shape) == {"tokens", "mask"}):
        raise ValueError(f"the text classifier needs the inputs tokens and mask (data.lengths), not {input_shape}")
    if not vocabulary_size:
        raise ValueError("the data do not say how many tokens there are: set model.vocabulary_size")
    if not isinstance(num_classes, int):
        raise ValueError(f"the text classifier needs one label of classes, not {num_classes}")
    if width % heads and depth:
        raise ValueError(f"width {width} is no multiple of heads {heads}")
    limit = input_shape["tokens"][0] or max_length
    return TextClassifier(vocabulary_size, limit, num_classes, width, depth, heads, dropout)
