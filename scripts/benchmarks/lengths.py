"""Samples/s of a text classifier: batches padded to the longest text of all, random batches padded to their longest,
buckets, and batches by tokens, in turns.

The texts are the paragraphs of Python's documentation, in two classes: about the language, or about a module.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TITLE = "text classification: buckets and batches by tokens against random batches and the longest of all"
FRAMEWORKS, TURNS, EPOCHS, MOST = ("pytorch", "tensorflow"), 3, 3, 256
COUNT = 6000  # texts
SAMPLES, TOKENS = {"batch_size": 32}, {"data.lengths.max_tokens": 32 * MOST}
PADDED = {
    "longest of all": SAMPLES | {"data.lengths.buckets": f"[{MOST}]"},
    "random batches": SAMPLES | {"data.lengths.buckets": "null"},
    "buckets": SAMPLES,
    "by tokens": TOKENS,
}


def build(num_classes: int, vocabulary_size: int, width: int = 64, heads: int = 4):  # noqa: ANN201
    """Build a transformer of one layer and the mean over a text's tokens, in PyTorch."""
    import torch
    from torch import nn

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(vocabulary_size, width), nn.Linear(width, num_classes)
            self.layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)

        def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            x = self.layer(self.words(tokens), src_key_padding_mask=~mask) * mask[..., None]
            return self.head(x.sum(1) / mask.sum(1, keepdim=True))

    return Classifier()


def build_keras(input_shape: dict, num_classes: int, vocabulary_size: int, width: int = 64, heads: int = 4):  # noqa: ANN201
    """Build the same model in Keras."""
    import keras
    from keras import layers

    kinds = {"tokens": "int64", "mask": "bool"}
    inputs = {name: keras.Input(input_shape[name], dtype=kind, name=name) for name, kind in kinds.items()}
    x = layers.Embedding(vocabulary_size, width)(inputs["tokens"])
    shown = keras.ops.expand_dims(inputs["mask"], 1)
    attended = layers.MultiHeadAttention(heads, width // heads)(x, x, attention_mask=shown)
    x = layers.LayerNormalization()(layers.Add()([x, attended]))
    x = layers.LayerNormalization()(layers.Add()([x, layers.Dense(width)(layers.Dense(4 * width, "relu")(x))]))
    x = layers.GlobalAveragePooling1D()(x, mask=inputs["mask"])
    return keras.Model(inputs, layers.Dense(num_classes)(x))


def write(path: Path) -> None:
    """Write the texts as JSON lines."""
    from pydoc_data.topics import topics

    from hvd_train.data.formats import docstrings

    modules = [file for file in sorted(Path(os.__file__).parent.glob("*.py")) if file.stem in sys.stdlib_module_names]
    documents = {"language": [*topics.values()], "module": [docstrings(file.read_bytes()) for file in modules]}
    lines = []
    for label, texts in documents.items():
        paragraphs = [" ".join(part.split()) for text in texts for part in text.split("\n\n") if part.strip()]
        lines += [json.dumps({"text": text, "label": label}) for text in paragraphs[: COUNT // 2]]
    path.write_text("\n".join(lines))


def run(framework: str, batches: dict, folder: Path) -> float:
    """Train for some epochs; return the samples/s."""
    (folder / "lengths.py").write_text(Path(__file__).read_text())
    model = "lengths:build" if framework == "pytorch" else "lengths:build_keras"
    keys = {"framework": framework, "model.name": model, "data.name": "labeled_text", "data.path": "texts.jsonl"}
    keys |= {"data.labels": "label", "data.lengths.max_length": MOST, "data.lengths.truncate": "true"}
    keys |= {"max_epochs": EPOCHS, "optim.name": "adam", "optim.lr": 0.001}
    keys |= {"run_dir": "run", "tensorboard": "false", **batches}
    sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    line = [str(Path(sys.executable).parent / "hvd-train"), "fit", "--overwrite", *sets]
    subprocess.run(line, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return json.loads((folder / "run" / "summary.json").read_text())["samples_per_second"]


def measure() -> list[dict]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "texts.jsonl")
        for framework in FRAMEWORKS:
            speeds: dict[str, list[float]] = {name: [] for name in PADDED}
            for _ in range(TURNS):
                for name, batches in PADDED.items():
                    speeds[name].append(run(framework, batches, Path(folder)))
            best = {name: max(values) for name, values in speeds.items()}
            row = {"framework": framework} | {f"samples/s, {name}": value for name, value in best.items()}
            ratios = {f"{name} / random": best[name] / best["random batches"] for name in ("buckets", "by tokens")}
            rows.append(row | ratios)
            print(json.dumps(rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    measure()
