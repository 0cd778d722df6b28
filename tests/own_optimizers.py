"""Optimizers of a user, for ``optim.name``, and those that cannot be taken."""

from __future__ import annotations


def torch_sgd(parameters):
    import torch

    return torch.optim.SGD(parameters, lr=1.0, momentum=0.9, weight_decay=0.01)


def torch_adadelta(parameters, names, lr):
    import torch

    biases = [p for p, name in zip(parameters, names, strict=True) if name.endswith("bias")]
    kernels = [p for p, name in zip(parameters, names, strict=True) if not name.endswith("bias")]
    return torch.optim.Adadelta([{"params": kernels, "lr": lr}, {"params": biases, "lr": 2 * lr}], weight_decay=0.01)


def keras_adadelta(variables, lr):
    import keras

    return keras.optimizers.Adadelta(lr, clipnorm=0.3)


def torch_adagrad(parameters):
    """Its state is there before the first step."""
    import torch

    return torch.optim.Adagrad(parameters, initial_accumulator_value=0.1)


def torch_first_layer(parameters, lr):
    """Moves the first layer alone, counted in the list."""
    import torch

    return torch.optim.SGD(list(parameters)[:2], lr=lr)


def torch_closure(parameters):
    import torch

    return torch.optim.LBFGS(parameters)


def torch_fails(parameters):
    raise KeyError("no such thing")


def nothing(parameters):
    return len(parameters)


def torch_counting(parameters):
    """Its count of steps is an attribute: no checkpoint would have it."""
    import torch

    class Counting(torch.optim.SGD):
        made = 0

        def step(self):
            self.made = self.made + 1
            return super().step()

    return Counting(parameters, lr=1.0)


def torch_numbers(parameters):
    import torch

    class Numbers(torch.optim.SGD):
        def step(self):
            for p in self.param_groups[0]["params"]:
                self.state[p]["seen"] = self.state[p].get("seen", 0) + 1
            return super().step()

    return Numbers(parameters, lr=1.0)


def torch_groups(parameters):
    import torch

    class Groups(torch.optim.SGD):
        def step(self):
            self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
            return super().step()

    return Groups(parameters, lr=1.0)


def torch_slow_weights(parameters):
    import torch

    class Slow(torch.optim.SGD):
        slow: dict

        def step(self):
            super().step()
            for p in self.param_groups[0]["params"]:
                self.slow.setdefault(p, p.detach().clone()).lerp_(p.detach(), 0.5)

    optimizer = Slow(parameters, lr=1.0)
    optimizer.slow = {}
    return optimizer


def torch_clock(parameters):
    import torch

    class Clock(torch.optim.SGD):
        def step(self):
            self.clock += 1
            super().step()

    optimizer = Clock(parameters, lr=1.0)
    optimizer.clock = torch.zeros(())
    return optimizer


def torch_wrapper(parameters):
    import torch

    class Wrapper(torch.optim.Optimizer):
        def step(self):
            self.inner.step()

    wrapper = Wrapper(parameters, {"lr": 1.0})
    wrapper.inner = torch.optim.Adam(parameters)
    return wrapper


def keras_wrapper(variables):
    import keras

    optimizer = keras.optimizers.SGD(1.0)
    optimizer.inner = keras.optimizers.Adam()
    return optimizer


def keras_variable(variables):
    import keras
    import tensorflow as tf

    optimizer = keras.optimizers.SGD(1.0)
    optimizer.clock = tf.Variable(0)
    return optimizer


def keras_schedule(variables):
    import keras

    return keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 100))


def keras_mean(variables):
    import keras

    return keras.optimizers.SGD(0.1, use_ema=True)


def keras_scale(variables):
    import keras

    return keras.optimizers.SGD(0.1, loss_scale_factor=8.0)
