"""What should be the same on every rank of an editing function: its code, and the values that it reads.

Compared are bytecode, constants, names and defaults. The location of the code is not compared: the file and
the line, the address of an object, the path of a file and the state of a random generator may differ between
ranks.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from functools import lru_cache, partial
from pathlib import PurePath
from types import (
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from megatron_flex.errors import HookError
from megatron_flex.runtime.edit_traits import traits_of

MAX_VALUES = 64  # values of a function that are compared one by one
MAX_DEPTH = 5  # nesting of containers
MAX_FUNCTION_LEVELS = 2  # nesting of functions in functions
MAX_ITEMS = 64  # entries of a container that are compared
MAX_SAMPLE = 64  # entries of a tensor that are compared, evenly spread
MAX_CHARACTERS = 60  # characters of a value
MARK = "rank_dependent"
# The code of these is compared by name alone; code executed from a text may claim to be of builtins.
LIBRARIES = {"torch", "megatron", "megatron_flex", "numpy", *sys.stdlib_module_names} - {
    "builtins",
    "__main__",
}
SCALARS: tuple[type, ...] = (str, bool, int, float, complex, bytes, type(None), type(Ellipsis), slice, range)
SCALARS += (torch.dtype, torch.layout, torch.memory_format, torch.Size)
CONTAINERS = (list, tuple, set, frozenset, dict)
BRACKETS: dict[type, tuple[str, str]] = {list: ("[", "]"), tuple: ("(", ")")}
ABSENT = object()
Marked = TypeVar("Marked", bound=Callable[..., Any])


def rank_dependent(*names: str) -> Callable[[Marked], Marked]:
    """Declare values of an editing function that differ between ranks by intention: they are not compared.

    Args:
        names: the names of closure variables, of global variables that the function reads, of arguments with
            a default value (or a value from `functools.partial`), and of attributes of a callable object.

    Returns:
        A decorator of editing functions.

    Raises:
        HookError: there is no name, or the decorated object cannot store attributes (a builtin; decorate a
            function that calls it).

    Examples:
        >>> rank = torch.distributed.get_rank()
        >>> @rank_dependent("rank")
        ... def log(current_module, inputs, save_ctx, modules):
        ...     print(f"rank {rank}: {tuple(inputs.shape)}")
        ...     return inputs
        >>> with attach(chunks, [HookFunction("decoder.layers.2", log)]):
        ...     train_step(chunks)
        rank 0: (16, 2, 32)
        rank 0: (16, 2, 32)
    """
    if not names or not all(isinstance(n, str) for n in names):
        raise HookError("rank_dependent() needs names, as in @mf.rank_dependent('rank')")

    def mark(function: Marked) -> Marked:
        try:
            setattr(function, MARK, frozenset(names) | getattr(function, MARK, frozenset()))
        except AttributeError:
            raise HookError(
                f"rank_dependent(): {function!r} cannot be decorated; decorate a function that calls it"
            ) from None
        return function

    return mark


class FunctionDigest(NamedTuple):
    """What ranks compare of an editing function: texts by name, which differ where the function does.

    Attributes:
        code: texts that must be the same.
        values: texts that should be the same.
    """

    code: dict[str, str]
    values: dict[str, str]


def digest_function(edit: Callable[..., Any], model_ids: AbstractSet[int] = frozenset()) -> FunctionDigest:
    """Make the digest of an editing function. The function is not called, and no device is synchronized.

    Args:
        edit: the function, a partial, a method, a module or another callable object. For one that declares
            `user_functions` the digest is that of these functions.
        model_ids: modules and parameters of the model, by id: ranks hold different shards, which are not
            compared.
    """
    reader = _FunctionReader(model_ids)
    reader.read(edit)
    values = reader.values
    if len(values) > MAX_VALUES:
        items = [*values.items()]
        values = dict(items[:MAX_VALUES]) | {
            "one of its further values": shorten(repr(items[MAX_VALUES:]), 0)
        }
    return FunctionDigest(reader.code, values)


class _FunctionReader:
    """Reads the facts of a function, and of the functions that it refers to.

    Args:
        model_ids: objects of the model, by id.
        level: the nesting depth of the functions.
    """

    def __init__(self, model_ids: AbstractSet[int], level: int = 0) -> None:
        self.code: dict[str, str] = {}
        self.values: dict[str, str] = {}
        self._model_ids, self._level = model_ids, level
        self._allowed: frozenset[str] = frozenset()
        self._seen: set[int] = set()

    def read(self, edit: Any) -> None:
        """Read the user's functions inside the package's wrappers."""
        inside = traits_of(edit).user_functions
        if inside is None:
            self._function(edit)
            return
        self._allowed |= getattr(edit, MARK, frozenset())
        for function in inside:
            self.read(function)

    def _function(self, function: Any) -> None:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        self._allowed |= getattr(function, MARK, frozenset())
        if isinstance(function, partial):
            try:
                names = list(inspect.signature(function.func).parameters)
            except (TypeError, ValueError):  # a builtin without a signature
                names = []
            bound = {names[n] if n < len(names) else str(n): value for n, value in enumerate(function.args)}
            for name, value in (bound | function.keywords).items():
                self._value("argument", name, value)
            self._function(function.func)
        elif isinstance(function, MethodType):
            self._allowed |= getattr(function.__func__, MARK, frozenset())
            self._object(function.__self__, function.__func__)
        elif isinstance(function, FunctionType):
            self._code([function])
            self._variables(function)
        elif _runs_user_code(type(function)):
            self._object(function, _entry(type(function)))
        elif isinstance(getattr(function, "__wrapped__", None), FunctionType):  # functools.cache
            self._function(function.__wrapped__)
        else:
            self._add(self.code, "function", _name(function))

    def _object(self, owner: Any, entry: Any) -> None:
        """Read the methods that run of an object, and the attributes that they read."""
        kind = owner if isinstance(owner, type) else type(owner)
        self._allowed |= getattr(owner, MARK, frozenset())
        if not isinstance(entry, FunctionType):
            self._add(self.code, "function", _name(entry))
            return
        functions, names = _find_methods(kind, entry)
        self._code(functions)
        if isinstance(owner, nn.Module):
            for name, value in [*owner._parameters.items(), *owner._buffers.items(), *owner._modules.items()]:
                self._value("attribute", name, value)
        for name in sorted(names):
            value = _attribute(owner, name)
            if value is not ABSENT:
                self._value("attribute", name, value)
        for function in functions:
            self._variables(function)

    def _variables(self, function: FunctionType) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if name != "__class__":
                self._value("closure variable", name, value)
        for name in _globals_read(function.__code__):
            value = function.__globals__.get(name, function)
            beside = isinstance(value, FunctionType) and value.__globals__ is function.__globals__
            if value is not function and (beside or isinstance(value, (Tensor, Enum, *CONTAINERS, *SCALARS))):
                self._value("global", name, value)

    def _code(self, functions: Sequence[FunctionType]) -> None:
        """Read the code of several functions together."""
        codes = [c for f in functions for c in _nested(f.__code__)]
        bytecode = [(c.co_code, c.co_exceptiontable, c.co_flags) for c in codes]
        counts = [(c.co_argcount, c.co_posonlyargcount, c.co_kwonlyargcount) for c in codes]
        self._add(self.code, "bytecode", shorten(repr((bytecode, counts)), 0))
        names = [(*c.co_names, *c.co_varnames, *c.co_freevars, *c.co_cellvars) for c in codes]
        self._add(self.code, "names", ", ".join(n for ns in names for n in ns))
        constants = [k for c in codes for k in c.co_consts if not isinstance(k, CodeType)]
        self._add(self.code, "constants", ", ".join(map(self._describe, constants)))
        defaults = [(n, v) for f in functions for n, v in _defaults(f) if n not in self._allowed]
        self._add(self.code, "defaults", ", ".join(f"{n}={self._describe(v)}" for n, v in defaults))

    def _add(self, facts: dict[str, str], name: str, text: str) -> None:
        while name in facts:
            name += "'"
        facts[name] = shorten(text)

    def _value(self, kind: str, name: str, value: Any) -> None:
        if name in self._allowed or len(self.values) > 4 * MAX_VALUES:
            return
        nested = self._read_nested(value)
        if nested is not None:
            self._add(self.values, f"{kind} {name!r}", f"{_name(value, 40)} {shorten(repr(nested.code), 0)}")
            for inner, text in nested.values.items():
                self._add(self.values, f"{inner} of {name!r}", text)
            return
        try:
            text = self._describe(value)
        except Exception:  # an error of the user's class must not stop one rank alone
            text = f"an object of {_name(type(value))}"
        self._add(self.values, f"{kind} {name!r}", text)

    def _read_nested(self, value: Any) -> _FunctionReader | None:
        """The reader of a value that is a function, or a callable object, of the user's code."""
        if not isinstance(value, (FunctionType, MethodType, partial)) and not _runs_user_code(type(value)):
            return None
        library = _is_library(getattr(value, "__module__", None) or "") and not isinstance(value, partial)
        deep = self._level >= MAX_FUNCTION_LEVELS
        if isinstance(value, nn.Module) or library or id(value) in self._seen or deep:
            return None
        reader = _FunctionReader(self._model_ids, self._level + 1)
        reader._seen, reader._allowed = self._seen, self._allowed
        reader.read(value)
        return reader

    def _describe(self, value: Any, depth: int = 0) -> str:
        """A value as text: the same for values that are the same on two ranks."""
        kind = type(value)
        if isinstance(value, Enum):
            return f"{_name(kind)}.{value.name}"
        if isinstance(value, PurePath) or (isinstance(value, str) and os.path.isabs(value)):
            return "a path"
        if isinstance(value, SCALARS):
            return repr(value)
        if isinstance(value, torch.device):
            return value.type
        if isinstance(value, Tensor):
            return "a parameter of the model" if id(value) in self._model_ids else _describe_tensor(value)
        if isinstance(value, nn.Module):
            if any(id(part) in self._model_ids for part in [*value.modules(), *value.parameters()]):
                return "a module of the model"
            tensors = [*value.named_parameters(), *value.named_buffers()][:MAX_VALUES]
            return f"{_name(kind)} {shorten(repr([(n, _describe_tensor(t)) for n, t in tensors]), 0)}"
        if depth < MAX_DEPTH and isinstance(value, CONTAINERS):
            items: Iterable[Any] = value.items() if isinstance(value, dict) else value
            texts = [self._describe(item, depth + 1) for item in [*items][:MAX_ITEMS]]
            texts = texts if isinstance(value, (list, tuple)) else sorted(texts)
            opening, closing = BRACKETS.get(kind, ("{", "}"))
            more = f", … {len(value)}" if len(value) > MAX_ITEMS else ""
            return f"{opening}{', '.join(texts)}{more}{closing}"
        if hasattr(value, "__array_interface__") and hasattr(value, "shape"):  # a numpy array
            return f"array {value.shape} {value.dtype}"
        return _name(value) if callable(value) else f"an object of {_name(kind)}"


def _describe_tensor(tensor: Tensor) -> str:
    """Shape and dtype, and on the CPU some entries, evenly spread from the first to the last."""
    shape, dtype = "x".join(map(str, tensor.shape)) or "scalar", str(tensor.dtype).removeprefix("torch.")
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.device.type != "cpu" or tensor.is_quantized or not tensor.numel():
        return f"tensor {shape} {dtype}"  # reading it would synchronize
    count = min(tensor.numel(), MAX_SAMPLE)
    at = torch.linspace(0, tensor.numel() - 1, count, dtype=torch.float64).long()
    places = torch.unravel_index(at, tensor.shape) if tensor.ndim else ()
    return f"tensor {shape} {dtype} {tensor.detach()[places].resolve_conj().resolve_neg().tolist()}"


def shorten(text: str, length: int = MAX_CHARACTERS) -> str:
    """A text of bounded length, which ends with a digest where it does not fit."""
    text = " ".join(text.split())
    if len(text) <= length:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:8]
    return f"{text[: max(length - 11, 0)]}{'… ' if length else ''}#{digest}"


def _name(value: Any, length: int = MAX_CHARACTERS) -> str:
    kind = value if hasattr(value, "__qualname__") else type(value)
    name = f"{getattr(kind, '__module__', '') or ''}.{kind.__qualname__}".removeprefix("builtins.").strip(".")
    return name.rpartition("<locals>.")[2][-length:]


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES


def _entry(kind: type) -> Any:
    """The method that runs when an object of a class is called; `forward` for a module. None without one."""
    name = "forward" if issubclass(kind, nn.Module) else "__call__"
    return next((vars(c)[name] for c in kind.__mro__ if name in vars(c)), None)


def _runs_user_code(kind: type) -> bool:
    """Whether calls of a class's objects run Python code of the user, or of a module."""
    library = _is_library(kind.__module__) and not issubclass(kind, nn.Module)
    return not library and isinstance(_entry(kind), FunctionType)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


@lru_cache(maxsize=512)
def _globals_read(code: CodeType) -> tuple[str, ...]:
    steps = (i for c in _nested(code) for i in dis.get_instructions(c))
    return tuple(dict.fromkeys(i.argval for i in steps if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")))


def _defaults(function: FunctionType) -> Iterator[tuple[str, Any]]:
    code, given = function.__code__, function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(given) : code.co_argcount], given, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _find_methods(kind: type, entry: FunctionType) -> tuple[list[FunctionType], set[str]]:
    """The methods that a method may call, itself first, and all names that they read."""
    methods, names, todo = [entry], set[str](), [entry]
    while todo:
        for name in (n for c in _nested(todo.pop().__code__) for n in c.co_names if n not in names):
            names.add(name)
            method = inspect.getattr_static(kind, name, None)
            method = getattr(method, "__func__", None) or getattr(method, "fget", None) or method
            if not isinstance(method, FunctionType) or (method.__module__ or "").startswith("torch."):
                continue
            if method not in methods:
                methods.append(method)
                todo.append(method)
    return methods, names


def _attribute(owner: Any, name: str) -> Any:
    """An object's attribute, without running code of its class; ABSENT if there is none to compare."""
    value = inspect.getattr_static(owner, name, ABSENT)
    if isinstance(value, MemberDescriptorType):  # a member of __slots__
        return getattr(owner, name, ABSENT)
    unknown = (FunctionType, property, classmethod, staticmethod, ModuleType, GetSetDescriptorType)
    if name in getattr(owner, "__dict__", ()):  # the class attribute of that name is compared already
        return value
    return ABSENT if isinstance(value, unknown) else value
