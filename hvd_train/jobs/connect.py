"""Build a job's update (from gradients to new weights) and connect it to the front-end."""

from __future__ import annotations

from hvd_train.compression import make
from hvd_train.config.conflicts import check_ranks, refused
from hvd_train.config.modes import SHARDED, ModeSpec
from hvd_train.core.training import Training
from hvd_train.errors import amount
from hvd_train.frontends.serial import Serial
from hvd_train.jobs.job import Job
from hvd_train.protocol import Communicator, Compressor, HostMemory, Model, Placement, Update
from hvd_train.run_folder.terminal import say
from hvd_train.update import auto, make_update
from hvd_train.update.averaged_update import averaged
from hvd_train.update.clip import Clip
from hvd_train.update.exchange import Exchange
from hvd_train.update.gradient_norms import GradientNorms
from hvd_train.update.parameter_groups import ParameterGroups, TensorSettings
from hvd_train.update.state import read

# ``optim.sharded: auto`` shards on hosts of so many ranks: with more, each waits for each in every step.
SHARDED_RANKS = range(2, 9)


def connect(job: Job, compression: str, user_hooks: bool = False, epoch: int = 0) -> tuple[Update, str]:
    """Build the update and connect it to the front-end. Returns it and the compression, which ``auto`` chooses by
    measuring.

    ``user_hooks``: user code runs between steps, and may change weights. ``epoch``: determines (from 0) which weights
    are frozen.
    """
    config, frontend, groups = job.config, job.frontend, job.frontend.groups
    rules = _freeze(job, epoch) if config.optim.groups else []
    options, specs = config.exchange, frontend.specs()

    def compressor(name: str) -> Compressor:
        return make(name, groups.data.size, groups.data.rank, **options.options(name))

    check_ranks(config, groups.data.size, groups.data.mpi)
    # Measured on the real buckets and links of this job, before the update is built with the result.
    if compression == "auto":
        compression, seconds = auto.choose(specs, frontend.packing, compressor, groups.data, frontend.ops)
        if groups.world.rank == 0 and seconds:
            listed = ", ".join(f"{name} {1000 * s:,.1f} ms" for name, s in seconds.items())
            say(f"exchange.compression: auto takes {compression} (an exchange: {listed})")

    def build(over: Communicator) -> Exchange:
        return Exchange(
            specs,
            frontend.packing,
            compressor(compression),
            over,
            frontend.ops,
            Clip(config.gradient_clip_val, config.gradient_clip_algorithm),
            op="adasum" if options.op == "adasum" else "sum",
            rules=rules,
            world=groups.world,
        )

    spec, memory = _spec_and_memory(job, user_hooks)
    update = make_update(options, frontend, build, Serial(), spec, memory)
    if config.noise_scale_every_n_steps:
        update.exchange.norms = GradientNorms(frontend.ops, 1.0 if spec is SHARDED else 1 / groups.data.size)
    return averaged(config, update, frontend), compression


def _spec_and_memory(job: Job, user_hooks: bool) -> tuple[ModeSpec, HostMemory | None]:
    """Return the kind of update, and the memory in which ranks of a host share the weights; None: they do not."""
    config, frontend, spec = job.config, job.frontend, job.config.update_spec
    # In shared memory a hook's change to the weights would be applied N times.
    if spec is SHARDED:
        return spec, None if user_hooks else frontend.host_memory()
    sharded = config.model_copy(update={"optim": config.optim.model_copy(update={"sharded": True})})
    entries = sum(spec.size for spec in frontend.specs())
    if (
        config.optim.sharded == "auto"
        and frontend.groups.data.size in SHARDED_RANKS
        and entries >= frontend.sharded_from
        and not user_hooks
        and all(key != "optim.sharded" for key, _ in refused(sharded))
    ):
        memory, reason = frontend.host_memory(auto=True), frontend.may_change_weights()
        if frontend.groups.world.rank == 0 and memory:
            say(f"optim.sharded: auto: the ranks share one copy of the {entries:,} weights, and each updates its part")
        elif frontend.groups.world.rank == 0 and reason:
            say(f"optim.sharded: auto: not sharded, because {reason} may change weights; if it does not: true")
        if memory:
            return SHARDED, memory
    return spec, None


def exchange_of(job: Job, compression: str) -> Exchange:
    """Return an exchange of gradients like the job's, without an update, to measure its time."""
    options, ranks, frontend = job.config.exchange, job.frontend.groups.data, job.frontend
    compressor = make(compression, ranks.size, ranks.rank, **options.options(compression))
    return Exchange(frontend.specs(), frontend.packing, compressor, ranks, frontend.ops)


def _freeze(job: Job, epoch: int) -> list[TensorSettings]:
    """Freeze the weights that are not trained in this epoch. Returns the rules of the others, in order."""
    frontend = job.frontend
    if job.parameter_groups is None:
        job.parameter_groups = ParameterGroups(job.config.optim, frontend.specs())
    frontend.freeze(job.parameter_groups.frozen(epoch), job.parameter_groups.fixed(epoch))
    return [job.parameter_groups.rules[spec.name] for spec in frontend.specs()]


def unfreeze(job: Job, trainer: Training, user_hooks: bool) -> None:
    """Unfreeze weights from this epoch on as in ``optim.groups``, keeping the others' optimizer state and residuals."""
    groups, progress = job.parameter_groups, trainer.progress
    if groups is None or groups.phase(progress.epoch) == progress.phase:
        return
    frontend, before = trainer.frontend, trainer.update
    frontend.run_queued()
    slots, residuals = (read(before.state(), kind) for kind in (Placement.REPLICATED, Placement.PER_RANK))
    old = _bucket_names(frontend, before)
    trainer.update, _ = connect(job, trainer.compression, user_hooks, progress.epoch)
    # The buckets of a rule do not depend on other rules, but are renumbered.
    places = {names: b for b, names in enumerate(_bucket_names(frontend, trainer.update))}
    trainer.update.load(slots, Placement.REPLICATED)
    split = {key: key.split("/") for key in residuals}
    kept = {f"{places[old[int(b)]]}/{k}": residuals[key] for key, (b, k) in split.items()}
    trainer.update.load(kept, Placement.PER_RANK)
    progress.phase = groups.phase(progress.epoch)
    count = amount(len(frontend.specs()), "tensor")
    trainer.log.message(f"epoch {progress.epoch + 1}: {count} of {len(groups.rules)} are trained from here on")


def _bucket_names(model: Model, update: Update) -> list[tuple[str, ...]]:
    specs = model.specs()
    return [tuple(specs[i].name for i in members) for members in update.buckets]
