"""A script as users have it, in 32 bits and with dropout: train_torch.py [KIND ...]."""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import hvd_train.torch as ht

kinds = sys.argv[1:]
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images[:110] / 16, dtype=torch.float32), torch.tensor(labels[:110]))
layers = [
    torch.nn.Linear(64, 32, bias="norm" not in kinds),
    torch.nn.ReLU(),
    torch.nn.Dropout(0.3),
    torch.nn.Linear(32, 10),
]
layers[1:1] = [torch.nn.BatchNorm1d(32)] * ("norm" in kinds)
model = torch.nn.Sequential(*layers)
model, optimizer = ht.distribute(
    model,
    torch.optim.AdamW(model.parameters(), lr=0.01),
    sync_batchnorm="joined" in kinds,
    average="summed" not in kinds,
)
sampler = WeightedRandomSampler(torch.linspace(0.1, 1, 110), 110) if "weighted" in kinds else None
loader = ht.shard(DataLoader(data, batch_size=12, shuffle=sampler is None, sampler=sampler))
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x + torch.randn_like(x) if "noise" in kinds else x), y)
            loss = loss * len(y) / ht.sum(len(y)) if "summed" in kinds else loss
        (loss / ht.size() if "divided" in kinds else loss).backward()
        optimizer.step()
    ht.save("last.ckpt", model=model, epoch=epoch)
print("trained to the end")
