"""``ht.distribute(sharded=True)``: trainings beside the same ones with whole slots on each rank."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import hvd_train.torch as ht
from hvd_train.errors import ConfigError
from hvd_train.script.pytorch import registry
from tests.script.pytorch.cases.models import cnn, digest, fit, loader, mlp, sgd

HIDDEN = 37  # entries that no number of ranks divides


class Lion(torch.optim.Optimizer):
    """Of a user's own: elementwise, with a number in its state, which is a Python number."""

    def __init__(self, params, lr=0.001):
        super().__init__(params, {"lr": lr})
        self.beta = 0.9

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(average=torch.zeros_like(p), steps=0)
                state["steps"] += 1
                p.add_(torch.sign(state["average"].lerp(p.grad, 1 - self.beta)), alpha=-group["lr"] / state["steps"])
                state["average"].lerp_(p.grad, 0.01)


class Scaled(torch.optim.SGD):
    """With a rate of each parameter's own, in a list beside the parameters."""

    def __init__(self, groups):
        super().__init__(groups, lr=0.1)
        for group in self.param_groups:
            group["scales"] = [1.0 + k for k in range(len(group["params"]))]

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p, scale in zip(group["params"], group["scales"], strict=True):
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * scale)


class Tied(nn.Module):
    """A number as a parameter, tied weights, a bias that is frozen."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.one, self.two, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.two.weight = self.one.weight
        self.last.bias.requires_grad_(False)

    def forward(self, x):
        return self.last(self.two(torch.relu(self.one(x.flatten(1)))) * self.scale)


OPTIM = torch.optim
OPTIMIZERS: dict[str, Callable] = {
    "sgd": lambda groups: OPTIM.SGD(groups, lr=0.1),
    "momentum": lambda groups: OPTIM.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3, foreach=True),
    "adam": lambda groups: OPTIM.Adam(groups, lr=0.01, amsgrad=True),
    "adam fused": lambda groups: OPTIM.Adam(groups, lr=0.01, fused=True),
    "adamw": lambda groups: OPTIM.AdamW(groups, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda groups: OPTIM.RMSprop(groups, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda groups: OPTIM.Adagrad(groups, lr=0.01, initial_accumulator_value=0.1),
    "adadelta": lambda groups: OPTIM.Adadelta(groups),
    "adamax": lambda groups: OPTIM.Adamax(groups, lr=0.01),
    "nadam": lambda groups: OPTIM.NAdam(groups, lr=0.01),
    "radam": lambda groups: OPTIM.RAdam(groups, lr=0.01),
    "rprop": lambda groups: OPTIM.Rprop(groups, lr=0.001),
    "asgd": lambda groups: OPTIM.ASGD(groups, lr=0.1, t0=3, lambd=0.01),
    "of the user": Lion,
    "by lists": Scaled,
}


def grouped(make: Callable, sharded: bool):
    """Biases have another rate and no decay; a schedule moves both, and gradients are clipped."""
    model = mlp(hidden=HIDDEN)
    biases = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1]}, {"params": biases, "lr": 0.002}]
    groups[1]["weight_decay"] = 0.0
    model, optimizer = ht.distribute(model, make(groups), sharded=sharded)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    return fit(model, optimizer, scheduler=schedule, clip=0.5), optimizer


def closure(sharded: bool):
    model = mlp(hidden=HIDDEN)
    model, optimizer = ht.distribute(model, torch.optim.Adam(model.parameters(), lr=0.01), sharded=sharded)
    for x, y in loader():

        def evaluate(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(evaluate)
    return model


def hooked(sharded: bool):
    """Hooks of the user clip over the groups before a step, and look at them after it."""
    model = mlp(hidden=HIDDEN)
    model, optimizer = ht.distribute(model, sgd(model), sharded=sharded)
    wanted = [id(p) for p in model.parameters()]

    def check(optimizer, *_):
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert [id(p) for p in held] == wanted and all(p.grad is not None for p in held)
        nn.utils.clip_grad_norm_(held, 0.3)

    optimizer.register_step_pre_hook(check)
    optimizer.register_step_post_hook(check)
    return fit(model, optimizer)


def scaled(sharded: bool):
    """The last rank overflows once: every rank leaves this step out."""
    model = mlp(hidden=HIDDEN).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    model, optimizer = ht.distribute(model, optimizer, sharded=sharded)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step, (x, y) in enumerate(loader()):
        optimizer.zero_grad()
        factor = 1e38 if step == 3 and ht.rank() == ht.size() - 1 else 1.0
        scaler.scale(F.cross_entropy(model(x.float()), y) * factor * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 1.0
    return model


def unfrozen(sharded: bool):
    """A layer joins the optimizer when it is unfrozen, as fine-tuning does it."""
    model = mlp(hidden=HIDDEN)
    model[1].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[4].parameters(), lr=0.01)
    model, optimizer = ht.distribute(model, optimizer, sharded=sharded)
    for step, (x, y) in enumerate(loader()):
        if step == 6:
            model[1].requires_grad_(True)
            optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.001})
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def channels_last(sharded: bool):
    model = cnn().to(memory_format=torch.channels_last)
    model, optimizer = ht.distribute(model, torch.optim.Adam(model.parameters(), lr=0.01), sharded=sharded)
    return fit(model, optimizer, accumulate=5)  # divides the batch of each of 1 to 4 ranks


def tied(sharded: bool):
    model = Tied().double()
    model, optimizer = ht.distribute(model, torch.optim.Adam(model.parameters(), lr=0.01), sharded=sharded)
    return fit(model, optimizer, to_none=False, accumulate=5, no_sync=False)


def compressed(sharded: bool):
    model = mlp(hidden=128)
    model, optimizer = ht.distribute(model, sgd(model), compression="topk", ratio=0.1, sharded=sharded)
    return fit(model, optimizer)


TRAININGS = {name: lambda sharded, make=make: grouped(make, sharded)[0] for name, make in OPTIMIZERS.items()}
TRAININGS |= {
    "closure": closure,
    "hooked": hooked,
    "scaled": scaled,
    "unfrozen": unfrozen,
    "channels last": channels_last,
    "tied": tied,
    "compressed": compressed,
}


def begin(seed: int = 0) -> None:
    """Draw and order samples as a process does that has just begun."""
    torch.manual_seed(seed)
    registry.loaders = 0


def entries(optimizer: torch.optim.Optimizer) -> int:
    """The entries of all slots of this rank."""
    return sum(x.numel() for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor))


def slots() -> dict[str, object]:
    """Slots of this rank and of all; ``state_dict`` holds what an optimizer with whole slots holds, bit for bit."""
    states, counts = [], []
    for sharded in (False, True):
        begin()
        _, optimizer = grouped(OPTIMIZERS["adam"], sharded)
        counts.append(entries(optimizer))
        states.append(optimizer.state_dict())
        assert entries(optimizer) == counts[-1]
    (whole, parts), same = states, True
    for k, state in whole["state"].items():
        same &= state.keys() == parts["state"][k].keys()
        same &= all(torch.equal(x, parts["state"][k][name]) for name, x in state.items())
    return {"entries": counts, "same": same and whole["param_groups"] == parts["param_groups"]}


def job(sharded: bool):
    model = cnn()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [10, 25])
    ht.distribute(model, optimizer, sharded=sharded)
    return model, optimizer, schedule, loader()


def begun(path: Path) -> str:
    """Train an epoch with a sharded optimizer, save, and train another one."""
    begin()
    model, optimizer, schedule, batches = job(True)
    fit(model, optimizer, scheduler=schedule, batches=batches)
    ht.save(path, model=model, optimizer=optimizer, schedule=schedule, batches=batches)
    fit(model, optimizer, scheduler=schedule, batches=batches)
    return digest(model)


def gone_on(path: Path, sharded: bool) -> nn.Module:
    """Load and train the second epoch."""
    begin(7)
    model, optimizer, schedule, batches = job(sharded)
    ht.load(path, model=model, optimizer=optimizer, schedule=schedule, batches=batches)
    fit(model, optimizer, scheduler=schedule, batches=batches)
    return model


def kept_in_memory() -> bool:
    """The best state is kept on all ranks, and given back."""
    begin()
    model, optimizer, _, _ = job(True)
    fit(model, optimizer)
    best = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    digests = []
    for _ in range(2):
        model.load_state_dict(best[0])
        optimizer.load_state_dict(copy.deepcopy(best[1]))  # whose numbers torch takes as they are
        digests.append(digest(fit(model, optimizer, batches=loader(shuffle=False))))
    return digests[0] == digests[1]


class Trusted(torch.optim.SGD):
    """Scales each tensor's step by norms, as LARS does."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(p.norm() / p.grad.norm())
        return super().step(closure)


class OfSize(Trusted):
    """Only of large tensors."""

    @torch.no_grad()
    def step(self, closure=None):
        large = [p for group in self.param_groups for p in group["params"] if min(p.shape) >= 100]
        for p in large:
            p.grad.mul_(p.norm() / p.grad.norm())
        return torch.optim.SGD.step(self, closure)


class Late(Trusted):
    """Only after some steps."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure) if self.steps > 30 else torch.optim.SGD.step(self, closure)


class ByPlace(torch.optim.SGD):
    """The last layers learn fastest."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for k, p in enumerate(reversed(group["params"])):
                p.sub_(p.grad, alpha=group["lr"] * 0.5**k)


class Lookahead(torch.optim.SGD):
    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.inner = torch.optim.SGD(self.param_groups, **options)


class ScheduleFree(torch.optim.SGD):
    def eval(self):
        """Swap weights for their averages."""


def refused() -> dict[str, str | None]:
    """name -> the message."""

    def message_of(make) -> str | None:
        model = mlp()
        try:
            ht.distribute(model, *make(model), sharded=True)
        except ConfigError as error:
            return str(error)
        return None

    def moved() -> str | None:
        model = cnn()
        model, optimizer = ht.distribute(model, sgd(model), sharded=True)
        model.to(memory_format=torch.channels_last)
        try:
            fit(model, optimizer)
        except ConfigError as error:
            return str(error)
        return None

    makers = {
        "lbfgs": lambda model: [torch.optim.LBFGS(model.parameters())],
        "muon": lambda model: [torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])],
        "adafactor": lambda model: [torch.optim.Adafactor(model.parameters())],
        "trusted": lambda model: [Trusted(model.parameters(), lr=0.0)],
        "of size": lambda model: [OfSize(model.parameters(), lr=0.1)],
        "late": lambda model: [Late(model.parameters(), lr=0.1)],
        "by place": lambda model: [ByPlace(model.parameters(), lr=0.1)],
        "lookahead": lambda model: [Lookahead(model.parameters(), lr=0.1)],
        "schedule free": lambda model: [ScheduleFree(model.parameters(), lr=0.1)],
        "none": lambda model: [],
    }
    return {name: message_of(make) for name, make in makers.items()} | ({"moved": moved()} if ht.size() > 1 else {})


def every_other(names: list[str]) -> dict[str, bool]:
    """Trainings of scripts as they are, with sharded=True put into them: whether their bits stay."""
    from tests.script.pytorch.cases import same_bits

    plain = ht.distribute

    @functools.wraps(plain)
    def sharded(*arguments, **options):
        divides = any(isinstance(x, torch.optim.Optimizer) for x in arguments)
        return plain(*arguments, **options, sharded=divides)

    same = {}
    for name in names:
        digests = []
        for distribute in (plain, sharded):
            begin()
            ht.distribute = distribute
            try:
                digests.append(digest(same_bits.SAME_BITS[name]()))
            finally:
                ht.distribute = plain
        same[name] = digests[0] == digests[1]
    return same
