"""A script of a user's own with a fault on one rank: python faults.py KIND."""

import os
import signal
import sys

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import hvd_train.torch as ht

kind = sys.argv[1]
torch.manual_seed(0)  # before ht.distribute: ranks whose data differ are stopped
data = TensorDataset(torch.randn(80, 4), torch.zeros(80).long())
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + ht.rank() * (kind == "rate")))
model, optimizer = ht.distribute(model, optimizer)
loader = ht.shard(DataLoader(data, batch_size=4, shuffle=True))
for step, (inputs, labels) in enumerate(loader):
    if ht.rank() == 1 and step == 3:
        if kind == "raise":
            raise RuntimeError("a fault of the user's own")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "exit":
            sys.exit(3)
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
print("trained")
