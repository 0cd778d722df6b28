"""Digits with DistributedDataParallel: torchrun --nproc_per_node 2 ddp_before.py"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits_torch import data, network
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(42)
train_set, test_set = data()
train_sampler = DistributedSampler(train_set)
train_loader = DataLoader(train_set, batch_size=32, sampler=train_sampler)
test_loader = DataLoader(test_set, batch_size=32, sampler=DistributedSampler(test_set, shuffle=False))

model = DistributedDataParallel(network())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)

for epoch in range(8):
    model.train()
    train_sampler.set_epoch(epoch)
    for inputs, labels in train_loader:
        optimizer.zero_grad()
        half = len(inputs) // 2
        with model.no_sync():
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
dist.all_reduce(totals)
if dist.get_rank() == 0:
    print(f"loss {totals[0] / totals[2]:.4f} accuracy {totals[1] / totals[2]:.4f}")
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, "digits.pt")
dist.destroy_process_group()
