"""Embeddings with options that depend on all words of a batch, of which each rank has a part."""

from __future__ import annotations

import torch

FIX = "leave the option out"


def dependent_on_batch(model: torch.nn.Module) -> str:
    """Describe the first embedding of ``model`` that N ranks would not train as one rank does; "" if there is none."""
    for path, layer in model.named_modules():
        if isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag):
            # Gradients are divided by how often a word occurs in the batch.
            if layer.scale_grad_by_freq:
                return f"{path or 'the model'}: scale_grad_by_freq would count the words of each rank's batch alone"
            # The forward pass shortens the vectors of the words that occur in the batch.
            if layer.max_norm is not None:
                return (
                    f"{path or 'the model'}: max_norm would change the vectors of each rank's words on that rank alone"
                )
    return ""
