"""Digits with Horovod: horovodrun -np 2 python horovod_torch_before.py"""

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from digits_torch import data, network
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

hvd.init()
torch.manual_seed(1)
torch.set_num_threads(1)
train_set, test_set = data()
train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train_set, batch_size=32, sampler=train_sampler)
test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
test_loader = DataLoader(test_set, batch_size=32, sampler=test_sampler)

model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

for epoch in range(8):
    model.train()
    train_sampler.set_epoch(epoch)
    for inputs, labels in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        with optimizer.skip_synchronize():
            optimizer.step()

model.eval()
loss, correct = 0.0, 0.0
with torch.no_grad():
    for inputs, labels in test_loader:
        logits = model(inputs)
        loss += F.cross_entropy(logits, labels, reduction="sum").item() / len(test_sampler)
        correct += (logits.argmax(1) == labels).float().sum().item() / len(test_sampler)
loss = hvd.allreduce(torch.tensor(loss), name="loss").item()
accuracy = hvd.allreduce(torch.tensor(correct), name="accuracy").item()
if hvd.rank() == 0:
    print(f"loss {loss:.4f} accuracy {accuracy:.4f}")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "digits.pt")
