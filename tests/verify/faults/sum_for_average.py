from hvd_train.cli.main import main
from hvd_train.core.step import StepRunner

run = StepRunner.run


def summed(self, step):
    """The loss is divided by this rank's samples, the gradients are added."""
    frontend, size = self.training.frontend, self.training.communicator.size
    real = frontend.train_step
    frontend.train_step = lambda placed, scale, *rest: real(placed, scale * size, *rest)
    try:
        return run(self, step)
    finally:
        frontend.train_step = real


StepRunner.run = summed
main()
