from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class HorovodSource(PythonPackage):
    """Horovod's source archive, which the engine of hvd_train is compiled from. Nothing of it is built here."""

    pypi = "horovod/horovod-0.28.1.tar.gz"

    license("Apache-2.0")

    version("0.28.1", sha256="92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0", expand=False)

    import_modules = []

    def install(self, spec, prefix):
        mkdirp(prefix.share)
        install(self.stage.archive_file, join_path(prefix.share, f"horovod-{spec.version}.tar.gz"))
