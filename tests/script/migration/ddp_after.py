"""Digits with hvd_train: mpirun -np 2 python ddp_after.py, or horovodrun, or alone"""

import torch
import torch.nn.functional as F
from digits_torch import data, network
from torch.utils.data import DataLoader

import hvd_train.torch as ht

torch.manual_seed(42)
train_set, test_set = data()
train_loader = ht.shard(DataLoader(train_set, batch_size=32, shuffle=True))
test_loader = ht.shard(DataLoader(test_set, batch_size=32))

model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
model, optimizer = ht.distribute(model, optimizer)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)

for _epoch in range(8):
    model.train()
    for inputs, labels in train_loader:
        optimizer.zero_grad()
        half = len(inputs) // 2
        with ht.no_sync(model):
            (F.cross_entropy(model(inputs[:half]), labels[:half]) / 2).backward()
        (F.cross_entropy(model(inputs[half:]), labels[half:]) / 2).backward()
        optimizer.step()
    scheduler.step()

model.eval()
totals = torch.zeros(3)
with torch.no_grad():
    for inputs, labels in test_loader:
        logits = model(inputs)
        totals[0] += F.cross_entropy(logits, labels, reduction="sum")
        totals[1] += (logits.argmax(1) == labels).sum()
        totals[2] += len(labels)
loss, correct, count = ht.sum(*totals)
ht.print(f"loss {loss / count:.4f} accuracy {correct / count:.4f}")
ht.save("digits.ckpt", model=model, optimizer=optimizer, scheduler=scheduler)
