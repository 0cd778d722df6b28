from pathlib import Path

from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyHvdTrain(PythonPackage):
    """Train PyTorch and Keras models in data parallel over Horovod."""

    # This clone. A site that mirrors it names the mirror here, and a commit.
    git = str(Path(__file__).resolve().parents[6])

    license("Apache-2.0")

    version("main", branch="main")

    variant("mpi", default=True, description="Exchange over MPI; without, over Gloo alone")
    variant("pytorch", default=True, description="Install PyTorch")
    variant("tensorflow", default=False, description="Install TensorFlow and Keras")

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("cmake@3", type="build")
    depends_on("ninja", type="build")
    depends_on("horovod-source@0.28.1", type="build")
    depends_on("py-patch-ng", type="build")
    depends_on("py-setuptools@64:79", type="build")

    depends_on("python@3.11:3.13", type=("build", "run"))
    with default_args(type="run"):
        depends_on("py-numpy")
        depends_on("py-pydantic@2:")
        depends_on("py-pyyaml")
        depends_on("py-click@8.2:")
        depends_on("py-rich")
        depends_on("py-safetensors")
        depends_on("py-psutil")
        depends_on("py-h5py")
        depends_on("py-pillow")
        depends_on("py-tensorboard")
        depends_on("py-matplotlib")
        depends_on("py-scikit-learn")
        depends_on("py-cloudpickle")
        depends_on("py-tokenizers")
        depends_on("py-pyarrow")
        depends_on("py-tqdm")

        depends_on("py-mpi4py@4.1:", when="+mpi")
        depends_on("py-torch", when="+pytorch")
        depends_on("py-tensorflow", when="+tensorflow")
        depends_on("py-keras@3:", when="+tensorflow")

    depends_on("mpi", type=("build", "link", "run"), when="+mpi")

    import_modules = ["hvd_train", "hvd_train.engine.library", "hvd_train.cli.main"]

    def setup_build_environment(self, env):
        env.set("XDG_CACHE_HOME", join_path(self.stage.path, "cache"))

    @run_before("install")
    def compile_engine(self):
        build = join_path("hvd_train", "engine", "build.py")
        source = self.spec["horovod-source"]
        archive = join_path(source.prefix.share, f"horovod-{source.version}.tar.gz")
        mpicc = self.spec["mpi"].mpicc if self.spec.satisfies("+mpi") else "none"
        with working_dir(self.stage.source_path):
            python(build, "--archive", archive, "--mpi", mpicc)

    @run_after("install")
    def check_installed(self):
        with working_dir("check", create=True):  # outside of the source, which Python would import
            Executable(self.prefix.bin.join("hvd-train"))("--version")
            python("-c", "from hvd_train.engine.library import chosen, load; load(chosen({}))")
