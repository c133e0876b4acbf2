"""`FlexModel`: hooks on a distributed model that read and edit full (unsharded) tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from megatron_flex.adapters import detect, list_model_chunks
from megatron_flex.adapters.module_walk import shared_walk
from megatron_flex.dump import Dump
from megatron_flex.errors import HookError
from megatron_flex.handles import Handle
from megatron_flex.layout import PackedSequences
from megatron_flex.model.argument_checks import explain_other_names, register_hook
from megatron_flex.model.hook_explanation import HookExplanation
from megatron_flex.model.interp import Interp
from megatron_flex.model.model_state import ModelState
from megatron_flex.model.registration import (
    register_dump,
    register_features,
    register_nonfinite,
    register_statistics,
    remove_sink,
)
from megatron_flex.model.report import Report
from megatron_flex.nonfinite import NonFinite
from megatron_flex.runtime import Captures, Context, HookFunction, Session
from megatron_flex.runtime.edit_failures import SkipCount
from megatron_flex.runtime.features.feature_plan import Receivers
from megatron_flex.runtime.features.features import Features
from megatron_flex.runtime.full_parameters import ParameterRequest
from megatron_flex.sites import Pattern, Site
from megatron_flex.statistics import Statistics
from megatron_flex.statistics.statistics_records import Sink
from megatron_flex.wording import count_words

if TYPE_CHECKING:
    from megatron_flex.estimate import Links, RunEstimate

Model = Any  # nn.Module | Sequence[nn.Module] | a schedule of torch.distributed.pipelining


class FlexModel(nn.Module):
    """A distributed model with hooks that read and edit full (unsharded) tensors.

    Every rank makes a FlexModel of the same model, and registers the same hooks in the same order. The
    `register_*` methods have the names of torch's methods, take a HookFunction instead of a callable, and
    return a handle whose `remove()` removes what was registered.

    Args:
        module: the model or the list of its virtual pipeline chunks, bare or wrapped by the framework.
            Framework, process groups and layouts are detected. A module of no known framework is used as a
            plain module. For a model that torch.distributed.pipelining runs, pass the schedule.
        tensor_parallel_size: if given, compared with the detected size, like the next two. For a module of
            no framework the three sizes define the mesh, ordered (pipeline, data, tensor): a size that is
            not given is 1, except that data parallelism gets all remaining ranks.
        pipeline_parallel_size: likewise.
        data_parallel_size: likewise.
        gather_data_parallel: concatenate the samples of all data parallel ranks along the batch dim, in rank
            order, instead of treating each replica separately: the first rank of all receives the captures,
            and edits get all samples. All replicas must then run in step. Tensors without a batch dim (rows
            of experts) stay separate. A gradient is that of the loss of each sample's own replica.
        process_group: the ranks of a module of no framework; None for the default group, or one process
            if torch.distributed is not initialized.
        verify: verify the first step, as `verify()` does.

    Raises:
        FlexError: sizes contradict each other, or hooks cannot work in this setup.

    Attributes:
        trainable_modules: this rank's replicas, by name. Their `state_dict()` is the same on every rank; load
            the same one on every rank, which `verify()` checks.

    Examples:
        >>> flex = FlexModel(chunks)
        >>> handle = flex.register_forward_hook(HookFunction("decoder.layers.*.mlp"))
        >>> train_step(chunks)
        >>> [tuple(t.shape) for t in flex.output_dict["decoder.layers.3.mlp"]]  # of 2 microbatches
        [(16, 2, 32), (16, 2, 32)]
        >>> model = flex.restore()
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
        vars(self)["_given"] = module  # not registered as a submodule: `chunks` holds its modules
        chunks = list_model_chunks(module)
        self.chunks = nn.ModuleList(chunks)
        sizes = {"tp": tensor_parallel_size, "pp": pipeline_parallel_size, "dp": data_parallel_size}
        with shared_walk():  # which modules there are stays until hooks are registered
            self.session = Session(detect(chunks, sizes, process_group), gather_data_parallel)
        self.trainable_modules = self.session.trainable.modules
        if verify:
            self.verify()

    # -- namespaces, made on first use; none of them refers to the FlexModel -----------------------------

    @cached_property
    def interp(self) -> Interp:
        """Run tokens with a cache, with hook functions or in a trace: `docs/lens.md`."""
        return Interp(self.session)

    @cached_property
    def report(self) -> Report:
        """The model as a tree in a terminal, as data, or as an HTML page: `docs/view.md`."""
        return Report(self.session, self.chunks)

    def __repr__(self) -> str:
        """One line; `print(flex.chunks)` prints the modules."""
        session = self.session
        models = " and ".join(dict.fromkeys(type(chunk).__name__ for chunk in self.chunks))
        state = count_words(len(session.registry.entries), "hook") if session.open else "restored"
        return f"<FlexModel of {models}, {session.mesh.describe()}: {state}>"

    def _repr_html_(self) -> str:
        return self.report._repr_html_()

    # -- the model -------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model with the same arguments as without hooks, and return what it returns on this rank.

        Raises:
            HookError: there are several virtual chunks, which only the framework's schedule can run.
        """
        if len(self.chunks) != 1:
            raise HookError(
                f"{len(self.chunks)} virtual chunks cannot be called; run the framework's schedule over them"
            )
        return self.chunks[0](*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's state dict; arguments as for `nn.Module.state_dict`.

        It has the names of the model without hooks. Names of several virtual chunks begin with `model0.`,
        `model1.`, as in Megatron's checkpoints, and those of trainable modules with `trainable_modules.`.
        """
        return ModelState(self.chunks, self.trainable_modules).save(args, kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Load what `state_dict()` returned; arguments and result as for `nn.Module.load_state_dict`.

        Raises:
            RuntimeError: names or shapes do not match.
        """
        return ModelState(self.chunks, self.trainable_modules).load(state_dict, strict, assign)

    def step(self) -> AbstractContextManager[None]:
        """Make all model calls and backward passes in a scope one step's microbatches. Every rank opens it.

        For custom training loops; each run of a framework's schedule is a step already. Ranks then
        synchronize where the scope begins and ends, not after each call and backward pass; pipeline stages
        that wait for each other's tensors need this. Guide: `docs/frameworks.md`.

        Raises:
            HookError: as in any step, when the scope ends; or another step is running, or the model was
                restored.
        """
        return self.session.step()

    def sites(self, pattern: Pattern = "**") -> list[Site]:
        """Return the hook points of the full model, on all pipeline stages; a notebook shows them as a table.

        Args:
            pattern: a name or glob of modules, with `:point` also of points in them, such as
                `decoder.layers.*.mlp:output`; `*` matches within one part of the path, `**` across parts.
        """
        with explain_other_names(self.session, lambda: [pattern]):
            return self.session.sites.match(pattern)

    def verify(self, steps: int = 1) -> None:
        """Validate this run against its layouts in the next `steps` steps or calls. Every rank calls it.

        After such a step the ranks compare checksums of the tensors at every hook point that is not hidden:
        replicated tensors and duplicated heads have the same bits on all ranks that hold them, shards have
        the shapes that the layouts promise, each hook point is reached on the same ranks and by no tensor
        twice, and replicated parameters are equal, also over data parallel ranks. Gradients at hook points
        are not checked. The gradient norm that the framework computes after the step is compared, at the end
        of the next step or in `restore()`, with the norm of the full gradients. Guide: `docs/captures.md`.

        Raises:
            VerifyError: at the end of such a step, on all ranks, with the findings of all ranks; for a norm
                also in `restore()`.
        """
        self.session.verify(steps)

    @property
    def is_leader(self) -> bool:
        """Whether this is the receiving rank, on which captures are returned."""
        return self.session.is_leader

    @property
    def output_dict(self) -> Captures:
        """The captures by hook point; empty except on the receiving rank.

        Filled at the end of each run of the schedule, or call of the model, or backward pass that follows it.
        """
        return self.session.captures

    @property
    def packed_sequences(self) -> dict[int, PackedSequences]:
        """The packed sequences of the last step, by microbatch; empty where nothing is packed.

        On every rank, from the beginning of the microbatch's forward pass while hooks are active.
        """
        return dict(self.session.clock.packs)

    @property
    def save_ctx(self) -> Context:
        """The values that editing functions share; outside of them, this rank's: `docs/edits.md`."""
        return self.session.editing.save_ctx

    def restore(self) -> Model:
        """Remove all hooks and patches, and return the model that FlexModel was given. Every rank calls it.

        Hooks stay active until then, even if no variable refers to the FlexModel any more; then they cannot
        be removed, and another FlexModel of the model adds to them. A second call does nothing. Afterwards,
        methods that act on the model raise; captures, `sites()` and parameters can still be read.

        Raises:
            HookError: a hook was called on no rank in any step in which it was active, or no step ran that
                `verify()` was to check, or some rank is still in a step; the model is restored nevertheless.
        """
        self.session.restore()
        return self._given

    def detach(self) -> Model:
        """Do the same as `restore()`; the counterpart of `attach()`."""
        return self.restore()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to copy or pickle, by a HookError: the session has patched one model."""
        raise HookError("a FlexModel can be neither copied nor pickled; copy the model that it was given")

    def __enter__(self) -> FlexModel:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.restore()
        else:
            self.session.close(failed=True)  # the first error is the one to report

    # -- hooks: every rank registers, removes and selects the same ones in the same order ----------------

    def register_forward_hook(self, hook: HookFunction) -> Handle:  # type: ignore[override]  # no callable
        """Capture, and perhaps edit, a module's output.

        Examples:
            >>> flex.register_forward_hook(HookFunction("decoder.layers.0.mlp"))
            <Handle of <HookFunction forward on decoder.layers.0.mlp>>
            >>> train_step(chunks)
            >>> flex.output_dict["decoder.layers.0.mlp:output"][0].shape
            torch.Size([16, 2, 32])
        """
        return register_hook(self.session, hook, "forward")

    def register_forward_pre_hook(self, hook: HookFunction) -> Handle:  # type: ignore[override]  # no callable
        """Capture, and perhaps edit, a module's input, `decoder.layers.0.mlp:input`."""
        return register_hook(self.session, hook, "forward_pre")

    def register_full_backward_hook(self, hook: HookFunction) -> Handle:  # type: ignore[override]  # no callable
        """Capture, and perhaps edit, a module's input gradient, `decoder.layers.0.mlp:input.grad`."""
        return register_hook(self.session, hook, "full_backward")

    def register_full_backward_pre_hook(self, hook: HookFunction) -> Handle:  # type: ignore[override]  # no callable
        """Capture, and perhaps edit, a module's output gradient, `decoder.layers.0.mlp:output.grad`."""
        return register_hook(self.session, hook, "full_backward_pre")

    def register_hook(self, hook: HookFunction) -> Handle:
        """Capture, and perhaps edit, a gradient at a parameter or hook point."""
        return register_hook(self.session, hook, "tensor")

    def remove_hook(self, hook: HookFunction) -> None:
        """Remove one hook; a HookError if it is not registered."""
        self.session.hooks.remove(hook)

    @property
    def groups(self) -> dict[str, list[HookFunction]]:
        """The hooks by group, without empty groups; `all` is every hook."""
        return self.session.hooks.groups

    @property
    def skipped(self) -> dict[HookFunction, SkipCount]:
        """For failed hooks with `on_error="skip"`, the `count` of failed passes and the first reason.

        Counts are this rank's; a pass counts too if another rank that holds the same tensor failed. The first
        rank warns when a hook first fails, and reports all counts in `restore()`.
        """
        return self.session.hooks.skipped

    def add_to_groups(self, hook: HookFunction, *groups: str) -> None:
        """Add a registered hook to groups, on every rank."""
        self.session.hooks.add_to_groups(hook, groups)

    def remove_from_groups(self, hook: HookFunction, *groups: str) -> None:
        """Remove a hook from groups, on every rank; a HookError if it is not in one of them."""
        self.session.hooks.remove_from_groups(hook, groups)

    def select(self, *words: str) -> None:
        """Switch groups on and off from the next step on, on every rank: `docs/launch.md`.

        The selection is valid until the next call, which replaces it; `hooks()` selects among the hooks that
        are on. A hook that no word names keeps its initial state: on, unless made with `enabled=False`.

        Args:
            words: `+steer` switches the group on, `-dump` off; `all` and `none` switch every hook. If several
                words name a hook, the last one is used. Without words, all hooks have their initial state.

        Raises:
            HookError: no hook is in such a group.
        """
        self.session.hooks.select(words)

    def hooks(self, *groups: str, complement: bool = False) -> AbstractContextManager[None]:
        """Choose which hooks are active in a scope, on every rank.

        The choice is valid for the steps, and calls of the model, that begin inside, with their backward
        passes. If no hook is active, the model runs as without hooks. Nested scopes: the innermost is used.

        Args:
            groups: names of groups, whose union is active; without any name, no hook is active. A name with
                the prefix `-` excludes its group. `all` is every hook, also if all names are excluded.
            complement: activate the other hooks instead.

        Raises:
            HookError: no hook is in such a group.

        Examples:
            >>> edit = HookFunction("decoder.layers.2", edits.scale(2.0), groups=["steer"])
            >>> handle = flex.register_forward_hook(edit)
            >>> with flex.hooks("-steer"):  # all hooks without these
            ...     train_step(chunks)
            >>> flex.output_dict
            Captures()
        """
        return self.session.hooks.scope(groups, complement)

    def dry_run(self) -> None:
        """Run each active editing function on a small random tensor. Every rank calls it.

        Each runs with its module, a temporary `save_ctx`, the trainable modules and its side effects, at the
        first hook point of its hook on each pipeline stage. (Registration does this for functions that only
        compute.) Small lengths replace unknown ones. Random generators and buffers of modules are restored.

        Raises:
            HookError: on all ranks, if a result is invalid, or a function raises with the lengths of a step.
                Where it raises with other lengths, a FlexWarning says so.
        """
        self.session.hooks.dry_run()

    def debug(self, on: bool = True) -> None:
        """Start or stop printing a line for each hook call to stderr. FLEX_DEBUG=1 starts it at once.

        On a GPU each hook call then waits until the GPU has finished, so that its time can be measured.
        """
        self.session.trace(on)

    def explain(self, hook: HookFunction) -> str:
        """Describe in several lines what a hook does at each of its hook points. Communicates nothing.

        Sizes in bytes are of a collective's result on one rank; dims whose lengths only the data determine
        appear by name. With `debug` on, the text includes the measurements of the last call on this rank.

        Raises:
            HookError: the hook is not registered.
        """
        return HookExplanation(self.session).explain(hook)

    def estimate(
        self,
        *,
        sequence_length: int | None = None,
        micro_batch_size: int | None = None,
        microbatches: int = 1,
        links: Links | None = None,
        sequences: PackedSequences | Sequence[int] | None = None,
    ) -> RunEstimate:
        """Estimate bytes by link, collectives and memory of a step: of each hook, and each stage's ranks.

        Covers active hooks, dumps and statistics. Communicates nothing and needs no previous step. Entries
        are counted in the dtype of the parameters, or in that in which Megatron keeps a tensor. Formulae:
        `docs/contributing/performance.md`.

        Args:
            sequence_length: of the full sequence, in tokens; None to use the setting of `megatron.training`.
            micro_batch_size: samples of a microbatch; None likewise.
            microbatches: of a step, on each data parallel rank.
            links: the bandwidths, and how many ranks share a node.
            sequences: the packed sequences of each microbatch, or their lengths in tokens where they have no
                padding; they give the other two lengths. None without packing.

        Raises:
            FlexError: nothing active has a cost that can be estimated, or a length is unknown.
        """
        # Imported here, as hooks need none of it.
        from megatron_flex.estimate.session_estimate import estimate_session

        given = {"s": sequence_length, "b": micro_batch_size}
        return estimate_session(self.session, self.chunks, given, microbatches, links, sequences)

    # -- dumps, statistics and values that are not finite ----------------------------------------------

    def register_dump(self, dump: Dump) -> Handle:
        """Dump tensors, before edits, from the next step on. Every rank calls it with the same settings.

        Hook points that a pattern matches but the configuration hides are left out, with a warning.

        Raises:
            SiteError: a pattern matches nothing.
            HookError: a named hook point, or all that a pattern matches, is hidden; on all ranks, if their
                dumps differ.
            DumpError: on all ranks: the folder cannot be written.

        Examples:
            >>> with flex.register_dump(Dump("dumps/new", "decoder.layers.*")):
            ...     train_step(chunks)
            >>> open_dump("dumps/new").iterations
            [0]
        """
        return register_dump(self.session, dump, self.chunks[0])

    def remove_dump(self, dump: Dump) -> None:
        """Remove a dump once it is written. Every rank calls it, between steps.

        Raises:
            DumpError: the dump is not registered; or, with on_error='raise', writing failed on some rank.
        """
        remove_sink(self.session, dump)

    def register_statistics(self, statistics: Statistics, sink: Sink | None = None) -> Handle:
        """Measure tensors, before edits, from the next step on. Every rank calls it with the same settings.

        Steps without gradients (evaluation) are not measured. Hook points that a pattern matches are left
        out, with a warning, if the configuration hides them or if ranks hold only partial sums.

        Args:
            statistics: the settings.
            sink: receives the numbers instead of files and the framework's writers, on every rank, when the
                step after the measured one ends.

        Raises:
            FlexError: a pattern matches nothing, or a named hook point, or all that a pattern matches, cannot
                be measured; on all ranks: their statistics differ, or the folder cannot be written.
        """
        return register_statistics(self.session, statistics, self.chunks[0], sink)

    def remove_statistics(self, statistics: Statistics) -> None:
        """Remove statistics once written; as for `remove_dump`, a FlexError if not registered."""
        remove_sink(self.session, statistics)

    def register_nonfinite(self, settings: NonFinite | Literal["stop", "warn"] = "stop") -> Handle:
        """Watch every step from the next one on for NaN and infinities. Every rank makes the same call.

        At the end of a step with such a value all ranks name the first tensor, in the order of execution,
        that is not finite: they raise, or warn.

        Args:
            settings: the mode, or the settings.

        Returns:
            A handle, whose `remove()` ends the search.

        Raises:
            FlexError: a pattern matches nothing, or a named hook point is hidden; on all ranks: their
                settings differ, or another search is registered.

        Examples:
            >>> with flex.register_nonfinite("warn"):
            ...     train_step(chunks)
        """
        return register_nonfinite(
            self.session, NonFinite(settings) if isinstance(settings, str) else settings
        )

    # -- features --------------------------------------------------------------------------------------

    def features(
        self,
        layers: Sequence[int],
        to: Receivers = "last_stage",
        *,
        full: bool = True,
        gradients: bool = False,
        at: str = "decoder.layers.{}",
        on_features: Callable[[Mapping[int, Tensor], int], None] | None = None,
    ) -> Features:
        """Bring hidden states of layers to ranks of other pipeline stages, within each step from the next on.

        Every rank calls it with the same layers. In the forward pass of a microbatch on the last stage,
        `features[17]` is the output of layer 17, after edits, for any code there: the loss function, or an
        editing function. A rank sends its shard to the rank with the same coordinates on the receiving
        stage; a layer on that stage is neither sent nor copied. With `full`, the receiving ranks then gather
        it. Each data parallel replica has its own tensors.

        Args:
            layers: numbers of layers of the whole model, from 0.
            to: `last_stage`, all ranks of it; `all` ranks; `leader`, the first rank of each replica; the
                numbers of pipeline stages; or a process group: its ranks, which are of one replica. Each rank
                then gives what `torch.distributed.new_group` returned, which may be a group for each
                replica. A stage has layers of later stages in its backward pass, or at the end of a step
                without one: use `on_features`.
            full: whether the tensors are full, `[s, b, h]` in Megatron, or shards as their layers have them,
                such as `[s/(cp*tp), b, h]` with sequence parallelism.
            gradients: whether a loss of the features trains the layers: then the gradients are those of one
                device, with activation recomputation too. Otherwise the tensors are detached, and train
                what is computed from them alone. Only to all ranks of the last stage. The loss is a part of
                what the loss function returns, or an editing function that returns a result that depends on
                the features.
            at: the hook point of each layer.
            on_features: called on the receiving ranks with the features of each microbatch, by layer, and
                its number, once all have arrived: on the last stage after the loss function.

        Returns:
            The features of the running microbatch, a mapping. `remove()`, or the end of a `with` block, ends
            the transfers.

        Raises:
            SiteError: no such layer.
            HookError: an argument is invalid; on all ranks, if they ask for different features. At the end
                of a step: a layer did not run, or on_features failed.

        Examples:
            >>> def show(features, microbatch):
            ...     print(microbatch, tuple(features[2].shape), features[2].requires_grad)
            >>> with attach(chunks) as flex, flex.features(layers=[0, 2], on_features=show):
            ...     train_step(chunks)
            0 (16, 2, 32) False
            1 (16, 2, 32) False
        """
        return register_features(self.session, layers, to, full, gradients, at, on_features)

    # -- parameters and trainable modules --------------------------------------------------------------

    def get_module_parameter(
        self,
        name: str,
        expected_shape: Sequence[int | None] | None = None,
        *,
        gradient: bool = False,
        reduced: bool | None = None,
        padded: bool = False,
        everywhere: bool = False,
    ) -> Tensor | None:
        """Gather a full parameter, or its gradient. Every rank calls it.

        Read a gradient after the step and before the optimizer step, which may scale and clip it in place.
        It has the framework's scale: averaged over microbatches, multiplied by the loss scale. A reduced
        gradient is averaged over data parallel ranks, as the framework does; one that is not reduced belongs
        to each data parallel replica alone, and Megatron's DDP has not divided it yet.

        Args:
            name: the global name; also of a buffer that all ranks hold alike, such as the bias of a router.
            expected_shape: of the full tensor, None for a dim of any length. Only checked, never required.
            gradient: return the gradient: `main_grad` where Megatron keeps one, `grad` otherwise.
            reduced: whether gradients are reduced, that is, whether `finalize_model_grads()` ran. Detected if
                the schedule calls that function (`config.finalize_model_grads_func`), or if no DDP wraps the
                model (then they are not reduced).
            padded: include the rows that pad a vocabulary to a multiple.
            everywhere: return the tensor on every rank instead of the receiving rank only.

        Returns:
            A copy on the CPU, on the receiving rank of each replica or on every rank; None on other ranks.

        Raises:
            SiteError: on all ranks: no such parameter, or the layout of its module is unknown.
            FlexError: on all ranks: another shape, no gradient, or `reduced` contradicts the gradient.
        """
        return self.session.parameters.get(
            name, expected_shape, ParameterRequest(gradient, reduced, padded, everywhere)
        )

    def set_module_parameter(
        self,
        name: str,
        value: Tensor | None,
        *,
        gradient: bool = False,
        reduced: bool | None = None,
        padded: bool = False,
        optimizer: Any = None,
    ) -> None:
        """Set a parameter, or its gradient, from a full tensor. Every rank calls it.

        All shards are set in place, also in every data parallel replica and tied output layer. Megatron's
        mixed-precision and distributed optimizers keep their own copies, which their next step would write
        back: pass the optimizer, or call its `reload_model_params()` at the end.

        Args:
            name: the global name.
            value: the full tensor; the same on every rank, or None on all but the receiving rank.
            gradient: set the gradient instead.
            reduced: as for `get_module_parameter`.
            padded: `value` includes the rows that pad a vocabulary; otherwise these rows keep their values.
            optimizer: `reload_model_params()` of this optimizer is called.

        Raises:
            SiteError: on all ranks: no such parameter, or the layout of its module is unknown.
            FlexError: on all ranks: another shape or dtype, differing values, or no value on the
                receiving rank.

        Examples:
            >>> name = "decoder.layers.3.mlp.linear_fc1.weight"
            >>> full = flex.get_module_parameter(name)
            >>> flex.set_module_parameter(name, 2 * full if flex.is_leader else None)
        """
        self.session.parameters.set(name, value, ParameterRequest(gradient, reduced, padded), optimizer)

    def named_full_parameters(
        self,
        gradients: bool = False,
        *,
        reduced: bool | None = None,
        padded: bool = False,
        everywhere: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the global names and full tensors, on the CPU, of all parameters or gradients.

        Every rank runs the iterator to its end; it is empty on ranks that receive nothing. It has the model's
        order; one full tensor exists at a time. Parameters without a known layout are left out with a
        warning, those without a gradient without one. Arguments as for `get_module_parameter`.
        """
        return self.session.parameters.named(ParameterRequest(gradients, reduced, padded, everywhere))

    def parameters_without_layout(self) -> dict[str, str]:
        """Return the parameters that cannot be gathered, by name, with the class of their module."""
        return self.session.parameters.without_layout

    def register_trainable_module(self, name: str, module: nn.Module) -> Handle:
        """Let editing functions train a module, as `modules[name]`. Every rank calls it.

        Each rank has a replica, on the model's device, initialized with the first rank's parameters and
        buffers. After each run of the schedule the replicas' gradients are equal bit for bit: those of the
        mean, over microbatches and data parallel ranks, of a microbatch's own loss. So any torch optimizer
        makes the same update on every rank. Guide: `docs/training.md`.

        Args:
            name: valid as a key of nn.ModuleDict.
            module: a module whose parameters are real numbers.

        Raises:
            HookError: the name is in use or invalid, or `module` is not a module; on all ranks, if names,
                shapes or dtypes differ between ranks.
        """
        return self.session.register_trainable(name, module)

    def remove_trainable_module(self, name: str) -> None:
        """Remove a module, between steps, on every rank. Its parameters keep their gradients.

        Raises:
            HookError: no module has that name, or, on all ranks, ranks remove different modules.
        """
        self.session.remove_trainable(name)

    def trainable_parameters(self) -> Iterator[nn.Parameter]:
        """Return an iterator over the parameters of the trainable modules, for an optimizer."""
        return self.trainable_modules.parameters()

    def freeze(self) -> None:
        """Stop computing gradients of the wrapped model's parameters. Every rank calls it.

        `unfreeze()` and `restore()` restore `requires_grad`. Do not step the model's own optimizer meanwhile:
        its weight decay would change parameters without a gradient.

        Raises:
            FlexError: the framework's wrapper would wait for gradients that are never computed.
        """
        self.session.freeze()

    def unfreeze(self) -> None:
        """Restore `requires_grad` to its values before `freeze()`. Every rank calls it."""
        self.session.trainable.unfreeze()
