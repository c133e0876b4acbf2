"""What a process is, as far as hooks could change it: take a `Fingerprint`, and see its `differences` later.

Compared are functions and classes that modules and classes of torch and of the frameworks hold (so every
patched attribute), constants of megatron_flex, adapters that are registered, stand-ins for modules, global
hooks of modules, modes of torch, process groups that megatron_flex made, threads, open files, shared memory,
child processes, handlers of signals and of exceptions, and finders of imports.
Objects are compared by identity. What is imported meanwhile is new, and no difference.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

# Packages whose modules and classes are compared; of torch those that anyone patches.
PACKAGES = ("megatron", "megatron_flex", "fairscale", "apex", "deepspeed", "accelerate", "tests")
OF_TORCH = ("torch.autograd.", "torch.distributed.", "torch.nn.parallel.")  # and all below these
THESE = (
    *("builtins", "os", "shutil", "socket", "subprocess", "sys", "tempfile", "threading", "time"),
    *(
        "torch",
        "torch.autograd",
        "torch.cuda",
        "torch.cuda.random",
        "torch.distributed",
        "torch.nn.functional",
    ),
    *("torch.nn.modules.module", "torch.optim.optimizer", "torch.random", "torch.serialization"),
    "torch.utils.checkpoint",
)
CODE = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, property),
    *(classmethod, staticmethod),
)
GLOBAL_HOOKS = "torch.nn.modules.module"
GLOBALS = "megatron.training.global_vars"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGCHLD)
HANDLERS = ("excepthook", "unraisablehook", "displayhook")
PATIENCE = 2.0  # seconds until a thread that ends must have ended

# whose changes are their own, at the first use
MADE_BY = ("torch._dynamo.mutation_guard.", "transformer_engine.pytorch.tensor._make_module_cast_func.")


class Fingerprint:
    """The process as it was when this was made, or when it was last found to be the same."""

    def __init__(self) -> None:
        self._groups = Groups()
        self._attributes = Attributes()
        self.renew()

    def renew(self) -> None:
        """Take the process as it is now for what it should be."""
        self._attributes.take()
        self._rest = self._all_else()

    def differences(self) -> list[str]:
        """What is other than it was, a line each; empty where nothing is."""
        out = self._attributes.changed()
        threads = self._rest["threads"]
        out += _threads(threads)
        now = self._all_else()
        for what in self._rest.keys() - {"threads"}:
            if self._rest[what] != now[what]:
                out.append(f"{what}: {_change(self._rest[what], now[what])}")
        return out

    def _all_else(self) -> dict[str, dict[Any, Any]]:
        import torch.distributed

        from megatron_flex.adapters.adapter_registry import finder_entries

        return {
            **_modes(),
            "modules that were not imported": dict.fromkeys(_stand_ins(), 1),
            "globals of megatron.training": _globals(),
            "adapters": {known.name: known.origin for known in finder_entries()},
            "default process group": {"is there": torch.distributed.is_initialized()},
            "process groups of megatron_flex": self._groups.made(),
            "files": _files(),
            "shared memory": _shared(),
            "child processes": _children(),
            "handlers of signals": {s.name: _identity(signal.getsignal(s)) for s in SIGNALS},
            "handlers of exceptions": {n: _identity(getattr(sys, n)) for n in HANDLERS},
            "finders of imports": {str(i): _identity(f) for i, f in enumerate(sys.meta_path)},
            "threads": {t.ident: t.name for t in threading.enumerate()},
        }


class Groups:
    """Which process groups megatron_flex has made on this rank, by the line that made them."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._made: Counter[str] = Counter()
        make = dist.distributed_c10d._new_process_group_helper

        def made(*args: Any, **kwargs: Any) -> Any:
            place = _maker()
            result = make(*args, **kwargs)
            if place:
                self._made[
                    f"{place} for {kwargs.get('global_ranks_in_group', args[2] if len(args) > 2 else '')}"
                ] += 1
            return result

        dist.distributed_c10d._new_process_group_helper = made

    def made(self) -> dict[str, int]:
        """More than one group for the same ranks from the same line: the first is kept for the next time."""
        return {place: max(count, 1) for place, count in self._made.items() if count > 1}


def groups() -> int:
    """How many process groups this rank is in."""
    import torch.distributed as dist

    return len(dist.distributed_c10d._world.pg_map)


def _maker() -> str:
    """The line of megatron_flex that asks for a process group; empty where none does."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("megatron_flex.") and not module.startswith("megatron_flex.cpu"):
            return f"{module}:{frame.f_lineno}"
        if module.endswith("parallel_state") or module == __name__:
            return ""
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _identity(value: Any) -> str:
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    return f"{name} at {id(value):#x}"


class Attributes:
    """Functions, classes and constants that modules, and classes of modules, hold under their names."""

    def __init__(self) -> None:
        self._modules = 0
        # By owner: its module, its dictionary, and the code and the constants in it.
        self._held: dict[str, tuple[types.ModuleType, Any, dict[str, Any]]] = {}

    def take(self) -> None:
        """Remember what all of them hold now."""
        if self._modules != len(sys.modules):  # new ones; what is known already has been found unchanged
            self._modules = len(sys.modules)
            for name, module, now in _owners():
                if name not in self._held or self._held[name][0] is not module:
                    self._held[name] = module, now, {n: v for n, v in now.items() if _stays(module, n, v)}

    def changed(self) -> list[str]:
        """What is other than when it was taken."""
        out: list[str] = []
        for owner, (module, now, before) in self._held.items():
            if sys.modules.get(module.__name__) is not module:  # imported anew, or gone
                if owner == module.__name__ and owner not in sys.modules:
                    out.append(f"module {owner} is gone")
                continue
            for name, old in before.items():
                new = now.get(name)
                if new is not old and not _name_of(new).startswith(MADE_BY):
                    out.append(f"attribute {owner}.{name} is {_name_of(new) if name in now else 'gone'}")
        return out


def _name_of(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _stays(module: types.ModuleType, name: str, value: Any) -> bool:
    """Whether a name of a module or class should go on meaning this value: code, or a constant of ours."""
    ours = module.__name__.startswith("megatron_flex")
    return isinstance(value, CODE) or (ours and name.isupper())


def _stand_ins() -> list[str]:
    """Modules of the compared packages that no import loaded: a test put them there."""
    loaded = list(sys.modules.items())
    return [n for n, m in loaded if n.partition(".")[0] in PACKAGES and getattr(m, "__spec__", None) is None]


def _globals() -> dict[str, str]:
    """What Megatron's training loop has told the whole process, such as its arguments."""
    held = vars(sys.modules[GLOBALS]) if GLOBALS in sys.modules else {}
    return {n: _identity(v) for n, v in held.items() if n.startswith("_GLOBAL_") and v is not None}


def _owners() -> Iterator[tuple[str, types.ModuleType, Any]]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and _compared(name):
            held = vars(module)
            yield name, module, held
            for attribute, value in list(held.items()):
                if isinstance(value, type) and value.__module__ == name:
                    yield f"{name}.{attribute}", module, vars(value)


def _compared(name: str) -> bool:
    return name in THESE or name.startswith(OF_TORCH) or name.partition(".")[0] in PACKAGES


def _modes() -> dict[str, dict[Any, Any]]:
    import torch

    hooks = vars(sys.modules[GLOBAL_HOOKS])
    return {
        "global hooks of modules": {
            n: len(v) for n, v in hooks.items() if n.startswith("_global_") and isinstance(v, dict)
        },
        "modes of torch": {
            "functions": torch._C._len_torch_function_stack(),
            "dispatch": torch._C._len_torch_dispatch_stack(),
            "anomaly": torch.is_anomaly_enabled(),
            "autocast": torch.is_autocast_enabled("cpu"),
        },
    }


def _files() -> dict[str, int]:
    """Open files by what they are; sockets and the like come and go with process groups."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the listing's own
            continue
        if not path.startswith(("socket:", "anon_inode:", "pipe:", "/proc/", "/dev/")):
            found[path] += 1
    return dict(found)


def _shared() -> dict[str, int]:
    """Mappings of shared memory, and files of it that are still there."""
    found: Counter[str] = Counter()
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[5].strip() if line.count(" ") > 4 and "/" in line else ""
            if path.startswith(("/memfd:", "/dev/shm/")):
                found[path] += 1
    return dict(found)


def _children() -> dict[str, int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as children:
            return dict.fromkeys(children.read().split(), 1)
    except OSError:  # a kernel without it
        return {}


def _threads(before: dict[int | None, str]) -> list[str]:
    deadline = time.monotonic() + PATIENCE
    while True:
        new = [t for t in threading.enumerate() if t.ident not in before and t.is_alive()]
        if not new or time.monotonic() > deadline:
            return [f"thread {t.name}" for t in new]
        new[0].join(0.05)


def _change(before: Any, after: Any) -> str:
    keys = [k for k in {**before, **after} if before.get(k) != after.get(k)]
    return ", ".join(f"{k} was {before.get(k, 'absent')} and is {after.get(k, 'absent')}" for k in keys[:6])
