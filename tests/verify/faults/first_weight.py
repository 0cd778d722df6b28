from hvd_train.cli.main import main
from hvd_train.core import loop

given = loop.Trainer.restore


def restored(self, snapshot):
    """The last rank's first weights are not those of the others."""
    given(self, snapshot)
    if self.communicator.rank == self.communicator.size - 1 > 0:
        tree = {k: x for k, x in self.frontend.state().items() if k.startswith("weights/")}
        tree[min(tree)].flat[0] += 1e-3
        self.frontend.load(tree)


loop.Trainer.restore = restored
main()
