from hvd_train.cli.main import main
from hvd_train.core import loop

given = loop.Trainer._step


def summed(self, step):
    """The loss is divided by this rank's samples, the gradients are added."""
    real = self.frontend.train_step
    size = self.communicator.size
    self.frontend.train_step = lambda placed, scale, *rest: real(placed, scale * size, *rest)
    try:
        return given(self, step)
    finally:
        self.frontend.train_step = real


loop.Trainer._step = summed
main()
