"""Digits with hvd_train: horovodrun -np 2 python horovod_torch_after.py"""

import torch
import torch.nn.functional as F
from digits_torch import data, network
from torch.utils.data import DataLoader

import hvd_train.torch as ht

torch.manual_seed(1)
train_set, test_set = data()
train_loader = ht.shard(DataLoader(train_set, batch_size=32, shuffle=True))
test_loader = ht.shard(DataLoader(test_set, batch_size=32))

model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * ht.size(), momentum=0.9)
model, optimizer = ht.distribute(model, optimizer)

for _epoch in range(8):
    model.train()
    for inputs, labels in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()

model.eval()
loss, correct = 0.0, 0.0
with torch.no_grad():
    for inputs, labels in test_loader:
        logits = model(inputs)
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        correct += (logits.argmax(1) == labels).float().sum().item()
loss, correct = ht.sum(loss, correct)
ht.print(f"loss {loss / len(test_set):.4f} accuracy {correct / len(test_set):.4f}")
ht.save("digits.ckpt", model=model, optimizer=optimizer)
