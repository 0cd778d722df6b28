from hvd_train.cli.main import main
from hvd_train.data import loader

given = loader.share


def overlapping(count, size, rank):
    """Every rank but the first begins one sample too early."""
    start, stop = given(count, size, rank)
    return max(start - 1, 0), stop - (start > 0)


loader.share = overlapping
main()
