"""Open MPI's ``mpirun``."""

from __future__ import annotations

import os
import re
import resource
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_train.errors import CommunicationError, ConfigError
from hvd_train.installation import PIP_MPI, install_fix
from hvd_train.launch.launchers import installed
from hvd_train.launch.launchers.base import Launcher, Layout

if TYPE_CHECKING:
    from hvd_train.launch.hosts import Hosts

BACKING, MEMORY = "OMPI_MCA_btl_vader_backing_directory", "/dev/shm"
UNREACHABLE = 205  # Open MPI's exit code if a daemon cannot connect to mpirun
# TCP keepalive: Open MPI probes a silent host after 5 minutes by default. These probe after 20 s, and give up 20 s
# later.
KEEPALIVE = {"OMPI_MCA_oob_tcp_keepalive_time": "20", "OMPI_MCA_oob_tcp_keepalive_intvl": "5"}
KEEPALIVE |= {"OMPI_MCA_oob_tcp_keepalive_probes": "4"}


SESSION_BYTES = 10 << 20  # mpirun and its ranks keep 8.3 MB in files, 2 ranks as well as 8
TEMPORARY = ("OMPI_MCA_orte_tmpdir_base", "TMPDIR", "TEMP", "TMP")  # in the order in which Open MPI reads them


def _check_temporary() -> None:
    """Raise ConfigError if mpirun's ranks would crash with this folder for temporary files."""
    name = next((name for name in TEMPORARY if os.environ.get(name)), "TMPDIR")
    folder = os.environ.get(name) or "/tmp"
    fix = f"set {name} to another folder, or use --launcher horovodrun, which needs none"
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        what = f"mpirun's files cannot be written: {error.strerror}"
        raise ConfigError(what, where=f"{name}: {folder}", fix=fix) from error
    if free < SESSION_BYTES:
        what = f"the disk has no room for mpirun's files: {SESSION_BYTES:,} bytes needed, {free:,} free"
        raise ConfigError(what, where=f"{name}: {folder}", fix=fix)


SEGMENT_BYTES = 4_194_312  # of a rank's shared-memory file; unused pages take no space
OPEN_FILES, OPEN_FILES_OF_RANK = 30, 4  # for mpirun itself: 2 ranks need 33 to 40, 4 ranks 41 to 48, 8 ranks 57 to 64


class Mpirun(Launcher):
    name = tool = "mpirun"
    place_variables = (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    )
    starts_ranks = True
    install = install_fix("--mpi wheel", PIP_MPI)
    library = "mpi"
    opens_terminals = True
    endless_programs = ("mpirun", "mpiexec", "orterun", "prterun", "orted", "prted")
    forwards_stops = True
    slow_to_end = True  # between two signals to its ranks it sleeps for a second

    def usable(self) -> bool:
        return super().usable() and installed.mpi_built() and not self._another()

    def _another(self) -> str:
        return installed.other_mpi(installed.find_tool(self.tool) or self.tool)

    def check(self) -> None:
        super().check()
        if other := self._another():
            path = installed.find_tool(self.tool)
            what = f"{path} is {other}'s, and -np starts ranks with Open MPI's"
            fix = f"start them by {self.tool} -np N hvd-train fit ..., or use --launcher horovodrun"
            raise ConfigError(what, where="--launcher mpirun", fix=fix)
        if not installed.mpi_built():
            where, fix = "--launcher mpirun", "use --launcher horovodrun"
            raise ConfigError("Horovod was built without MPI", where=where, fix=fix)
        _check_temporary()

    def command(self, layout: Layout, program: Sequence[str]) -> list[str]:
        from hvd_train.launch.hosts import travelling

        # Ranks bind themselves (see environment.bind): mpirun would give each one core, however many there are.
        line = [installed.find_tool(self.tool) or self.tool, "--quiet", "-np", str(layout.num_proc)]
        line += ["--bind-to", "none"]
        if layout.hosts:
            # Names only: mpirun forwards their values, and Open MPI's own variables.
            exported = [word for name in travelling(os.environ) for word in ("-x", name)]
            return [*line, "-H", layout.hosts.words, *exported, *program]
        return [*line, "--map-by", "slot:oversubscribe", *program]

    def settings(self, hosts: Hosts | None) -> dict[str, str]:
        needed = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_orte_forward_job_control": "1"}
        if hosts:
            needed |= {"OMPI_MCA_btl": "self,vader,tcp", **KEEPALIVE}
            if hosts.interfaces:
                needed |= {f"OMPI_MCA_{layer}_if_include": hosts.interfaces for layer in ("btl_tcp", "oob_tcp")}
            else:
                needed["OMPI_MCA_oob_tcp_if_exclude"] = "lo"
        else:
            # Ranks of one host need no network; a listening port is one more thing to protect.
            needed |= {"OMPI_MCA_btl": "self,vader", "OMPI_MCA_oob_tcp_if_include": "lo"}
            # Within an allocation mpirun would start even this host's ranks through Slurm, and may wait for ever.
            for layer in ("ras", "plm"):
                needed |= {f"OMPI_MCA_{layer}": "^slurm", f"PRTE_MCA_{layer}": "^slurm"}
            # It looks for what would reach other hosts, and ends without it, as in a small container.
            if not any(map(shutil.which, ("ssh", "rsh"))):
                needed |= {"OMPI_MCA_plm_rsh_agent": "", "PRTE_MCA_plm_ssh_agent": ""}
        settings = {name: value for name, value in needed.items() if name not in os.environ}
        if os.geteuid() == 0:
            settings |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return settings

    def check_limits(self, num_proc: int) -> None:
        most, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], OPEN_FILES + OPEN_FILES_OF_RANK * num_proc
        if 0 <= most < needed:
            what = f"mpirun needs {needed} open files for {num_proc} ranks, and {most} are allowed"
            raise ConfigError(what, where="ulimit -n", fix="ulimit -n 1024")
        folder = os.environ.get(BACKING, MEMORY)
        with suppress(OSError):
            free = shutil.disk_usage(folder).free
            if free < SEGMENT_BYTES:
                what = f"no room for mpirun's shared memory: {SEGMENT_BYTES:,} bytes needed, {free:,} free"
                fix = "make it larger (docker run --shm-size=1g), or use --launcher horovodrun, which needs none"
                raise ConfigError(what, where=folder, fix=fix)

    def folders(self) -> dict[str, str]:
        # By default, shared-memory files and those of each mpirun lie among other jobs', with no sign whether their job
        # is alive.
        return {BACKING: MEMORY, "OMPI_MCA_orte_tmpdir_base": tempfile.gettempdir()}

    def remove_left(self) -> None:
        with suppress(OSError):
            for line in Path("/proc/self/maps").read_text().splitlines():
                path = line.partition("/")[2]
                if "/vader_segment." in path:  # this rank's, and those of the ranks that it has talked to
                    Path(f"/{path}").unlink(missing_ok=True)
        folder = Path(os.environ.get("PMIX_SERVER_TMPDIR", ""))
        if re.fullmatch(r"pid\.\d+", folder.name):  # mpirun's own
            shutil.rmtree(folder, ignore_errors=True)

    def exit_code(self, code: int, signals: Sequence[int], layout: Layout) -> int:
        if layout.hosts and not signals and code == UNREACHABLE:
            hosts = ", ".join(layout.hosts.needed(layout.num_proc or 1))
            what = f"mpirun's daemons on {hosts} do not reach one another, though ssh does"
            fix = "open the ports between the hosts, or name another network: --network-interfaces"
            raise CommunicationError(what, where=f"-H {layout.hosts.words}", fix=fix)
        return super().exit_code(code, signals, layout)
