"""One rank that meets the others as hvd-train does, and loads no framework; what is set then, as JSON in a line.

``meet.py [RANK:WORD ...]``: what a rank does first: ``leaves`` without a word, ``fails`` with an error of the data.
"""

import json
import os
import sys
import time

from hvd_train.errors import DataError
from hvd_train.launch.environment import world
from hvd_train.launch.failed_rank import exit_with_error
from hvd_train.launch.rendezvous import client as rendezvous

here = world()
try:
    does = dict(word.split(":") for word in sys.argv[1:]).get(str(here.rank))
    if does == "leaves":
        os._exit(0)
    rendezvous.prepare(here)
    if does == "fails":
        raise DataError("no such file", where=f"rank {here.rank}'s disk")
    rendezvous.join_world(here)
except Exception as error:
    exit_with_error(error)
own = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD")}
print(json.dumps({"launcher": here.launcher, "node": os.environ["SLURMD_NODENAME"], **own}), flush=True)
time.sleep(1 if here.rank == 0 else 0)  # its desk answers the others; else Horovod keeps it
