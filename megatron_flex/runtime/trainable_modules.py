"""Trainable modules that editing functions use: replicated on every rank, gradients summed at the end of a
step.

A gradient is not accumulated in `p.grad` at once but stored; at the end of the step the sum over all ranks is
added to `p.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megatron_flex.adapters import Adapter, Undo
from megatron_flex.collectives import (
    Agreement,
    broadcast_copies,
    checksum,
    combine_replicas,
    find_differing_axes,
    max_over_ranks,
    sum_over_ranks,
    weak_hook,
)
from megatron_flex.errors import HookError
from megatron_flex.runtime.clock import Clock

OUTSIDE_SCHEDULE = (
    "a gradient reached trainable parameter {name} outside the schedule, where it is not known which of "
    "{size} pipeline stages has it; compute this loss in an editing function, or add it to the model's"
)
NO_GRADIENT = (
    "{ranks} had no gradient of trainable modules within {seconds:g} s: this backward pass ran on "
    "some ranks only; outside the schedule call backward() on every rank, data parallel ones too"
)
INTO_THE_MODEL = (
    "the loss of an editing function reached back beyond it, into the model; compute it from inputs.detach()"
)


class TrainableModules:
    """The trainable modules of a session.

    Attributes:
        modules: the modules, by name.
    """

    def __init__(
        self,
        adapter: Adapter,
        clock: Clock,
        meeting: Agreement,
        gather_data_parallel: bool,
        await_backward: Callable[[], None],
    ) -> None:
        self.adapter, self.mesh, self.clock = adapter, adapter.mesh, clock
        self.modules = nn.ModuleDict()
        self._meeting = meeting
        self._over_data = gather_data_parallel
        self._await_backward = await_backward
        self._doing: Literal["", "first", "replay"] = ""
        self._edit_loss_grads: dict[str, Tensor] = {}  # gradients of the losses of editing functions
        self._through: dict[str, Tensor] = {}  # gradients of the model's loss
        self._buffers: dict[str, Tensor] = {}  # buffers at the beginning of the step
        self._microbatches: int | None = None  # of the running schedule; None outside one
        self._watched: dict[str, tuple[Any, Any]] = {}
        self._undos: list[Undo] = []
        self._frozen: Undo | None = None

    # -- registering -----------------------------------------------------------------------------------

    def check(self, name: str, module: nn.Module) -> str:
        """Check a module before registration; return a text that must be the same on all ranks.

        Raises:
            HookError: the object is not a module, or the name is not allowed.
        """
        if not isinstance(module, nn.Module):
            raise HookError(f"trainable module {name!r} is a {type(module).__name__}; pass an nn.Module")
        if not isinstance(name, str) or not name or "." in name:
            raise HookError(f"trainable module {name!r}: its name must be a string without dots; rename it")
        if name in self.modules:
            raise HookError(f"a trainable module {name!r} is registered already; choose another name")
        if hasattr(self.modules, name):
            raise HookError(f"{name!r} is a method of nn.ModuleDict; choose another name")
        if any(t.is_complex() for t in _list_module_tensors(module).values()):
            raise HookError(f"trainable module {name!r} has complex parameters; keep real parts")
        models = {id(site.parameter) for site in self.adapter.parameters()}
        if any(id(p) in models for p in module.parameters()):
            raise HookError(f"trainable module {name!r} is a part of the wrapped model; make one of its own")
        signature = {n: (tuple(t.shape), str(t.dtype)) for n, t in _list_module_tensors(module).items()}
        return f"trainable module {name} {signature}"

    def add(self, name: str, module: nn.Module) -> None:
        """Register a module, and broadcast the first rank's values. Collective over the mesh."""
        parameters = [site.parameter for site in self.adapter.parameters()]
        module.to(
            next((p.device for p in parameters if p is not None and not p.is_meta), None)
        )  # or offloaded
        broadcast_copies(list(_list_module_tensors(module).values()), self.mesh)
        if not self.modules:
            self._undos.append(self.adapter.enable_recomputed_gradients())
        self.modules[name] = module
        self._watch()

    def remove(self, name: str) -> None:
        """Remove a module; its parameters keep their gradients.

        Raises:
            HookError: no module has that name.
        """
        if name not in self.modules:
            known = ", ".join(self.modules) or "none"
            raise HookError(f"no trainable module {name!r} is registered; those that are: {known}")
        del self.modules[name]
        self._watch()
        for tensors in (self._edit_loss_grads, self._through, self._buffers):
            for key in [n for n in tensors if n.startswith(f"{name}.")]:
                del tensors[key]
        if not self.modules:
            for undo in self._undos:
                undo()
            self._undos.clear()

    def freeze(self) -> None:
        """Set `requires_grad` of all parameters of the model to False."""
        if self._frozen is None:
            self._frozen = self.adapter.storage.freeze()

    def unfreeze(self) -> None:
        """Undo `freeze`."""
        if self._frozen is not None:
            self._frozen()
            self._frozen = None

    def close(self) -> None:
        """Remove all hooks from the modules, and undo `freeze` on the model."""
        self.unfreeze()
        for undo in self._undos:
            undo()
        for _, handle in self._watched.values():
            handle.remove()
        self._undos.clear()
        self._watched.clear()
        self._forget()

    # -- running ---------------------------------------------------------------------------------------

    @contextmanager
    def editing(self, replay: bool) -> Iterator[None]:
        """The context of an editing function; `replay` if the function has run on this tensor before.

        With trainable modules, gradients are enabled even if the model runs without them.
        """
        before, self._doing = self._doing, "replay" if replay else "first"
        buffers = {n: b.clone() for n, b in self.modules.named_buffers()} if replay else {}
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() or bool(self.modules)):
                yield
        finally:
            self._doing = before
            for name, buffer in self.modules.named_buffers() if replay else ():
                buffer.data.copy_(buffers[name])  # `data` only: a graph may have saved the buffer

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """The context of an editing function that may fail: on an exception, restore gradients and
        buffers.
        """
        before, self._edit_loss_grads = self._edit_loss_grads, {}
        buffers = {n: b.clone() for n, b in self.modules.named_buffers()}
        try:
            yield
        except Exception:  # raised again
            self._edit_loss_grads = before
            for name, buffer in self.modules.named_buffers():
                buffer.data.copy_(buffers[name])  # `data` only, as above
            raise
        received, self._edit_loss_grads = self._edit_loss_grads, before
        for name, grad in received.items():
            before[name] = before[name] + grad if name in before else grad

    def contain(self, full: Tensor) -> None:
        """Raise if the loss of an editing function propagates backward beyond the function's input."""
        if full.grad_fn is not None:
            full.grad_fn.register_prehook(weak_hook(self._contained))

    def _contained(self, _: Any) -> None:
        if self._doing:
            raise HookError(INTO_THE_MODEL)

    def _watch(self) -> None:
        """Install hooks where gradients are accumulated in parameters; these nodes may change."""
        by_name = dict(self.modules.named_parameters())
        for name in [n for n in self._watched if n not in by_name or not by_name[n].requires_grad]:
            self._watched.pop(name)[1].remove()
        for name, parameter in by_name.items():
            if not parameter.requires_grad:
                continue
            with torch.enable_grad():
                view = parameter.expand_as(parameter)
            assert view.grad_fn is not None
            node: Any = view.grad_fn.next_functions[0][0]
            known = self._watched.get(name)
            if known is None or known[0] is not node:
                if known is not None:
                    known[1].remove()
                self._watched[name] = node, node.register_prehook(partial(self._arrives, name))

    def _arrives(self, name: str, grads: tuple[Tensor | None, ...]) -> tuple[None] | None:
        """Store a gradient that would be accumulated in a parameter's."""
        grad = grads[0]
        if grad is None:
            return None
        if self._doing == "replay":
            return (None,)
        if not self._doing and self._microbatches is None:
            if self.mesh["pp"].size > 1:
                raise HookError(OUTSIDE_SCHEDULE.format(name=name, size=self.mesh["pp"].size))
            self._await_backward()
        into = self._edit_loss_grads if self._doing else self._through
        grad = grad.detach().to_dense() if grad.layout is not torch.strided else grad.detach()
        if name in into:
            into[name] += grad
        else:
            into[name] = grad.to(_choose_sum_dtype(grad.dtype), copy=True)
        return (None,)

    def begins(self, microbatches: int | None) -> None:
        """Begin a schedule with that number of microbatches, or (None) a call of the model."""
        self._forget()
        self._microbatches = microbatches
        if self.modules:
            self._watch()
            self._buffers = {n: b.clone() for n, b in self.modules.named_buffers()}

    def _forget(self) -> None:
        self._edit_loss_grads.clear()
        self._through.clear()
        self._buffers.clear()

    # -- synchronization -------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait for the other ranks at the end of a backward pass that the user runs on each of them.

        Raises:
            HookError: some rank does not arrive.
        """
        if self.modules:
            self._meeting.compare("gradients")

    def synchronize(self) -> None:
        """Add to each parameter's gradient the contributions of all ranks since the last synchronization.

        The result is the gradient of the mean, over microbatches and data parallel ranks, of a microbatch's
        own loss; for the model's loss, where the framework divides it by all tokens, of the mean over tokens.
        The changes that editing functions made to buffers are summed and averaged likewise.

        Collective over the mesh, if there are trainable modules.
        """
        if not self.modules:
            return
        own_factor, through = self._scales()
        parameters = {n: p for n, p in self.modules.named_parameters() if p.requires_grad}
        with torch.no_grad():
            moved = self._moved()
            pieces = {n: self._contribution(n, p, own_factor, through) for n, p in parameters.items()} | moved
            sums, present = self._combined(pieces)
            for name, parameter in parameters.items():
                if name in present:
                    grad = sums[name].to(parameter.dtype)
                    parameter.grad = grad.clone() if parameter.grad is None else parameter.grad.add_(grad)
            for name, buffer in self.modules.named_buffers():
                if name in moved:
                    before = self._buffers[name]
                    after = before.double() + sums[name].to(before.device)
                    buffer.data.copy_(after if buffer.is_floating_point() else after.round())
        self._forget()
        self._microbatches = None

    def _scales(self) -> tuple[float, float]:
        """The factors of the gradients of the functions' losses, and of the model's loss, before
        averaging.
        """
        count = self._microbatches
        # Where an edit sees the samples of all replicas, each replica has the gradient of the sum of losses.
        joint = self.mesh["dp"].size if self._over_data else 1
        if count is None:
            return 1.0, 1.0 / joint
        factor = joint * (1.0 if self.clock.by_calls else self.clock.gradient_factor)
        if self.clock.tokens is None:
            return 1 / count, 1 / (factor * count)
        tokens = sum_over_ranks(self.clock.tokens, self.mesh, ("pp", "cp", "dp"))
        return 1 / count, self.mesh["dp"].size / (factor * max(tokens, 1.0))

    def _contribution(self, name: str, parameter: Tensor, own_factor: float, through: float) -> Tensor | None:
        parts = [
            grads[name] * s
            for grads, s in ((self._edit_loss_grads, own_factor), (self._through, through))
            if name in grads
        ]
        return sum(parts[1:], parts[0]) if parts else None

    def _moved(self) -> dict[str, Tensor | None]:
        """The changes of buffers in this step, for buffers that changed on some rank."""
        watched = {
            n: b for n, b in self.modules.named_buffers() if n in self._buffers and b.dtype != torch.bool
        }
        if not watched:
            return {}
        changes = {n: (self._buffers[n], b) for n, b in watched.items()}
        changed_here = [int(not torch.equal(old, new)) for old, new in changes.values()]
        changed = max_over_ranks(changed_here, self.mesh)
        return {
            n: torch.where(new == old, 0.0, new.double() - old.double())
            for (n, (old, new)), c in zip(changes.items(), changed, strict=True)
            if c
        }

    def _combined(self, pieces: dict[str, Tensor | None]) -> tuple[dict[str, Tensor], set[str]]:
        """The sums over all ranks, and the names of the entries that some rank contributes to."""
        shapes = {n: t.shape for n, t in _list_module_tensors(self.modules).items() if n in pieces}
        if not pieces:
            return {}, set()
        some = next(iter(_list_module_tensors(self.modules).values()))
        wide = any(t.dtype == torch.float64 for t in self.modules.parameters())
        dtype = torch.float64 if wide else torch.float32
        length = sum(s.numel() for s in shapes.values())
        flat = torch.zeros(length + len(pieces), dtype=dtype, device=some.device)
        ends = list(accumulate(shapes[n].numel() for n in pieces))
        places = {n: flat[e - shapes[n].numel() : e] for n, e in zip(pieces, ends, strict=True)}
        flags = flat[length:]
        for index, (name, contribution) in enumerate(pieces.items()):
            if contribution is not None:
                places[name].copy_(contribution.reshape(-1))
                flags[index] = 1
        combine_replicas(flat, self.mesh)
        sums = {n: place.view(shapes[n]) for n, place in places.items()}
        return sums, {n for n, flag in zip(pieces, flags.tolist(), strict=True) if flag}

    def unequal(self) -> list[str]:
        """What differs between ranks, as text. Collective over the mesh."""
        tensors = _list_module_tensors(self.modules)
        if not tensors:
            return []
        axes = [a.name for a in self.mesh]
        differing = find_differing_axes(
            [dict.fromkeys(axes, checksum(t)) for t in tensors.values()], self.mesh, axes
        )
        return [
            f"trainable_modules.{name} differs between ranks along {', '.join(along)}; load it on every rank"
            for name, along in zip(tensors, differing, strict=True)
            if along
        ]


def _list_module_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _choose_sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of a dtype are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32
