"""The face: `FlexModel` wraps a model, `attach` does the same without a wrapper, for a training script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from megatron_flex.adapters import detect, opened
from megatron_flex.dump import Dump
from megatron_flex.errors import HookError
from megatron_flex.model.costing import Costing
from megatron_flex.model.dumping import Dumps
from megatron_flex.model.hook_explanation import HookExplanation
from megatron_flex.model.interp import Interp
from megatron_flex.model.measuring import Measures
from megatron_flex.model.notebook import Notebook
from megatron_flex.model.registering import Registering
from megatron_flex.model.rehearsing import Rehearsing
from megatron_flex.model.showing import Showing
from megatron_flex.model.training import TrainableModuleRegistration
from megatron_flex.model.whole import ParameterAccess
from megatron_flex.runtime import Captures, Context, HookFunction, Session
from megatron_flex.sites import Pattern, Site
from megatron_flex.statistics import Statistics

Model = Any  # nn.Module | Sequence[nn.Module] | a schedule of torch.distributed.pipelining


class FlexModel(  # type: ignore[misc]
    Registering,
    Dumps,
    Measures,
    TrainableModuleRegistration,
    Rehearsing,
    HookExplanation,
    Costing,
    Showing,
    Notebook,
    ParameterAccess,
    Interp,
    nn.Module,
):
    """A distributed model whose tensors are read and edited as one device would hold them.

    Every rank makes one, on the same model, and registers the same hooks in the same order. The `register_*`
    methods have the names of torch's and take a HookFunction instead.

    Args:
        module: the model or the list of its virtual pipeline chunks, bare or wrapped by the framework.
            Framework, groups and layouts are found. Any other module is taken as it is. Of a model that
            torch.distributed.pipelining runs, the schedule.
        tensor_parallel_size: if given, compared with what was found; likewise the two others. A module of
            no framework has the mesh that they say, ranks divided as (pipeline, data, tensor): 1 where none
            is given, and all that is left as data parallel ranks.
        pipeline_parallel_size: likewise.
        data_parallel_size: likewise.
        gather_data_parallel: put the samples of all data parallel ranks together along the batch dim, in
            their order, instead of each replica's for itself: reads arrive on the first rank of all, edits
            see all samples. All replicas must then run in step. Tensors without a batch dim (rows of experts)
            stay each replica's own. A gradient is that of each sample's own replica's loss.
        process_group: the ranks of a module of no framework; None for the default group, or one process
            where torch.distributed is not in use.
        verify: check the first step, as `verify()` does.

    Raises:
        FlexError: sizes contradict, or hooks cannot work at all here.
    """

    def __init__(
        self,
        module: Model,
        *,
        tensor_parallel_size: int | None = None,
        pipeline_parallel_size: int | None = None,
        data_parallel_size: int | None = None,
        gather_data_parallel: bool = False,
        process_group: Any = None,
        verify: bool = False,
    ) -> None:
        super().__init__()
        vars(self)["_given"] = module  # no submodule: `chunks` has its modules
        chunks = opened(module)
        self.chunks = nn.ModuleList(chunks)
        sizes = {"tp": tensor_parallel_size, "pp": pipeline_parallel_size, "dp": data_parallel_size}
        adapter = detect(chunks, sizes, process_group)
        self.session = Session(adapter, gather_data_parallel)
        self.trainable_modules = self.session.trainable.modules
        if verify:
            self.verify()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, as it is called without hooks.

        Raises:
            HookError: there are several chunks, which only the framework's schedule can run.
        """
        if len(self.chunks) != 1:
            raise HookError(
                f"{len(self.chunks)} virtual chunks cannot be called; run the framework's schedule over them"
            )
        return self.chunks[0](*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the model, under its own names; this rank's, as without hooks.

        Several virtual chunks have the same names: those of chunk 1 begin with `model1.`, as in Megatron's
        checkpoints. What belongs to trainable modules begins with `trainable_modules.`.

        Args:
            args: of `nn.Module.state_dict`, likewise `kwargs`.
        """
        prefix = kwargs.pop("prefix", "")
        out: Any = kwargs.pop("destination", None)
        for head, module in self._heads():
            out = module.state_dict(*args, destination=out, prefix=prefix + head, **kwargs)
        return out

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Load what `state_dict()` gave.

        Args:
            state_dict: by the same names.
            strict: whether all of them must be there, and no others.
            assign: whether the tensors themselves become the model's.

        Returns:
            Names that are missing, and names that are too many, as `nn.Module.load_state_dict` does.

        Raises:
            RuntimeError: names or shapes do not fit.
        """
        missing: list[str] = []
        over: list[str] = []
        left = dict(state_dict)
        for head, module in reversed(self._heads()):  # the model's own head may be empty: what is left is its
            own = {n.removeprefix(head): left.pop(n) for n in list(left) if n.startswith(head)}
            found = module.load_state_dict(own, strict, assign)
            missing += [head + n for n in found.missing_keys]
            over += [head + n for n in found.unexpected_keys]
        if strict and left:
            raise RuntimeError(f"{next(iter(left))!r} is of none of the chunks; names begin with model0.")
        return _IncompatibleKeys(missing, [*over, *left])

    def _heads(self) -> list[tuple[str, nn.Module]]:
        """What names in a state dict begin with, and whose they are."""
        one = len(self.chunks) == 1
        chunks = [("" if one else f"model{n}.", chunk) for n, chunk in enumerate(self.chunks)]
        return [*chunks, ("trainable_modules.", self.trainable_modules)]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Take all calls of the model in a scope, with their backward passes, as microbatches of one step.

        For training loops of one's own; a framework's schedule is a step as it is. Ranks then meet where the
        scope begins and ends, and not at the end of each call and backward pass, as pipeline stages need that
        wait for each other's tensors. Every rank opens the scope alike.

        Raises:
            HookError: as a step does, when the scope ends; or another step is under way.
        """
        self.session.step_begins(None, microbatches=0)
        try:
            yield
        except BaseException:
            self.session.step_ends(True)
            raise
        self.session.step_ends(False)

    def sites(self, pattern: Pattern = "**") -> list[Site]:
        """The places of the whole model, all pipeline stages, where hooks can stand; in a notebook a table.

        Args:
            pattern: a name or glob of modules, or with `:` of points in them; `*` stays within one step of
                the path, `**` does not.
        """
        return self.session.sites.match(pattern)

    def verify(self, steps: int = 1) -> None:
        """Check this run against its layouts in the next steps. Every rank calls it.

        Each rank notes what passes through every site that is not hidden; when the step is over they compare:
        replicated tensors and duplicated heads have the same bits on all ranks that hold them, shards make
        the shapes that their sites promise, each site is passed on all ranks alike and by no tensor twice;
        parameters that layouts call replicated are equal, over data parallel ranks too. It costs a checksum
        of every such tensor. Values and parameters are checked; the gradients of sites are not.

        Args:
            steps: how many runs of the schedule, or calls of the model, from the next one on.

        Raises:
            VerifyError: at the end of such a step, on all ranks, with the findings of all ranks.
        """
        self.session.verify(steps)

    @property
    def is_leader(self) -> bool:
        """Whether what is read arrives on this rank: the first one of each model replica, or of all."""
        return self.session.is_leader

    @property
    def output_dict(self) -> Captures:
        """On the leader (the first rank of each model replica) what was read, by site; elsewhere empty.

        Filled at the end of each run of the schedule, or call of the model, or backward pass behind it.
        """
        return self.session.captures

    @property
    def save_ctx(self) -> Context:
        """What editing functions share; outside of them what stays on this rank, and what was kept."""
        return self.session.editing.save_ctx

    def restore(self) -> Model:
        """Take everything out again. Every rank calls it.

        Returns:
            The model as it was given, with each function, class and attribute as it was.

        Raises:
            HookError: a hook fired on no rank in any step that it stood in, or no step ran that `verify()`
                was to check; the model is restored even so.
        """
        silent, unverified = self.session.standing.silent(), self.session.watch.missed
        self.session.editing.skipping.warn_of_skips()
        self.session.close()
        if silent:
            names = ", ".join(h.describe() + (f" ({why})" if why else "") for h, why in silent)
            raise HookError(
                f"never fired on any rank: {names}; the path did not run (no labels, no backward pass, a "
                "frozen part, a fused kernel): hook another place, or remove the hook before the end"
            )
        if unverified:
            raise HookError("verify() was asked for and no step ran after it; call it before a step")
        return self._given

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A session has taps in one model, and is neither copied nor pickled.

        Raises:
            HookError: always.
        """
        raise HookError("a FlexModel can be neither copied nor pickled; copy the model that it was given")

    def __enter__(self) -> FlexModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.restore()
        else:
            self.session.close(failed=True)  # what went wrong first is what matters


def attach(
    model: Model,
    hooks: Sequence[HookFunction] = (),
    *,
    dumps: Sequence[Dump] | Dump = (),
    statistics: Sequence[Statistics] | Statistics = (),
    tensor_parallel_size: int | None = None,
    pipeline_parallel_size: int | None = None,
    data_parallel_size: int | None = None,
    gather_data_parallel: bool = False,
    process_group: Any = None,
    verify: bool = False,
) -> FlexModel:
    """Put hooks on a model without wrapping it.

    Every rank calls it alike. Use it as a context manager, or call `restore()` at the end.

    Args:
        model: the model or its chunks.
        hooks: each with its `hook_type`.
        dumps: what is written to disk.
        statistics: what is measured.
        tensor_parallel_size: as for FlexModel, and likewise what follows.
        pipeline_parallel_size: likewise.
        data_parallel_size: likewise.
        gather_data_parallel: likewise.
        process_group: likewise.
        verify: likewise.
    """
    flex = FlexModel(
        model,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        data_parallel_size=data_parallel_size,
        gather_data_parallel=gather_data_parallel,
        process_group=process_group,
        verify=verify,
    )
    try:
        for hook in hooks:
            flex.session.add(hook)
        for dump in [dumps] if isinstance(dumps, Dump) else dumps:
            flex.register_dump(dump)
        for measured in [statistics] if isinstance(statistics, Statistics) else statistics:
            flex.register_statistics(measured)
    except Exception:
        flex.session.close(failed=True)
        raise
    return flex
