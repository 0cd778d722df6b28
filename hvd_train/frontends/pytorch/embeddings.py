"""Find embeddings with options that depend on all words of a batch, of which each rank has only a part."""

from __future__ import annotations

import torch

FIX = "leave the option out"


def dependent_on_batch(model: torch.nn.Module) -> str:
    """Describe the first embedding of ``model`` whose training depends on the number of ranks; "" if there is none."""
    for path, layer in model.named_modules():
        if isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag):
            # Gradients are divided by the word's frequency in the batch.
            if layer.scale_grad_by_freq:
                return f"{path or 'the model'}: scale_grad_by_freq would count the words of each rank's batch alone"
            # The forward pass renormalizes the vectors of the words in the batch.
            if layer.max_norm is not None:
                return (
                    f"{path or 'the model'}: max_norm would change the vectors of each rank's words on that rank alone"
                )
    return ""
