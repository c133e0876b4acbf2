"""The traits of an editing function that should be the same on every rank: its code, and the values it reads.

Compared are bytecode, constants, names and defaults. The location of the code is not compared: the file and
the line, the address of an object, the path of a file and the state of a random generator may differ between
ranks.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import os
import random
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from functools import lru_cache, partial
from math import prod
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from megatron_flex.errors import HookError
from megatron_flex.runtime.edit_traits import traits_of

MAX_VALUES = 64  # values of a function that are compared one by one
MAX_DEPTH = 6  # nesting of containers
MAX_FUNCTION_LEVELS = 2  # nesting of functions in functions
MAX_ITEMS = 256  # entries of a container that are compared
MAX_SAMPLE = 64  # entries of a tensor that are compared, evenly spread
MAX_CHARACTERS = 60  # characters of a value
MARK = "rank_dependent"
# The code of these is compared by name alone; code executed from a text may claim to be of builtins.
LIBRARIES = {"torch", "megatron", "megatron_flex", "numpy", *sys.stdlib_module_names} - {
    "builtins",
    "__main__",
}
SCALARS = (bool, int, float, complex, bytes, type(None), type(Ellipsis), slice, range)
TORCH_TYPES = (torch.dtype, torch.layout, torch.memory_format, torch.Size)
BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    dict: ("{", "}"),
}
GENERATORS = (torch.Generator, random.Random)
RECORDS = (SimpleNamespace, Namespace)  # of the standard library, with attributes of a person's
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
        >>> with attach(chunks, [HookFunction("decoder.layers.2", editing_function=log)]):
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


class Trait(NamedTuple):
    """A compared property.

    Attributes:
        name: the name, such as `constants` or `closure variable 'scale'`.
        digest: equal on two ranks if the property is the same.
        shown: a short text of the value.
    """

    name: str
    digest: str
    shown: str


class FunctionDigest(NamedTuple):
    """The compared traits of an editing function.

    Attributes:
        code: traits that must be the same.
        values: traits that should be the same.
    """

    code: tuple[Trait, ...]
    values: tuple[Trait, ...]


def digest_function(edit: Callable[..., Any], own: AbstractSet[int] = frozenset()) -> FunctionDigest:
    """Make the digest of an editing function. The function is not called, and no device is synchronized.

    Args:
        edit: the function, a partial, a method, a module or another callable object. For one that declares
            `user_functions` the digest is that of these functions.
        own: modules and parameters of the model, by id: ranks hold different shards, which are not compared.
    """
    reader = _TraitReader(own)
    reader.written(edit)
    values = reader.values
    if len(values) > MAX_VALUES:
        rest = digest_text("".join(f"{t.name}{t.digest}" for t in values[MAX_VALUES:]))
        values = [*values[:MAX_VALUES], Trait("one of its further values", rest, f"#{rest[:6]}")]
    return FunctionDigest(tuple(reader.code), tuple(values))


class _TraitReader:
    """Collects the traits of functions.

    Args:
        own: objects of the model, by id.
        level: the nesting depth of the functions.
    """

    def __init__(self, own: AbstractSet[int], level: int = 0) -> None:
        self.code: list[Trait] = []
        self.values: list[Trait] = []
        self._own, self._level = own, level
        self._allowed: frozenset[str] = frozenset()
        self._seen: set[int] = set()

    def written(self, edit: Any) -> None:
        """Read the user's functions inside the package's wrappers."""
        inside = traits_of(edit).user_functions
        if inside is None:
            self._function(edit)
            return
        self._allowed |= getattr(edit, MARK, frozenset())
        for function in inside:
            self.written(function)

    def _function(self, function: Any) -> None:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        self._allowed |= getattr(function, MARK, frozenset())
        if isinstance(function, partial):
            names = _parameters(function.func)
            for i, value in enumerate(function.args):
                self._value("argument", names[i] if i < len(names) else str(i), value)
            for name, value in function.keywords.items():
                self._value("argument", name, value)
            self._function(function.func)
        elif isinstance(function, MethodType):
            self._allowed |= getattr(function.__func__, MARK, frozenset())
            self._object(function.__self__, function.__func__)
        elif isinstance(function, FunctionType):
            wrapped = getattr(function, "__wrapped__", None)
            if wrapped is not None:
                self._function(wrapped)
            self._code_of([function])
            self._reads(function, wrapped)
        elif _is_persons(type(function)):
            self._object(function, _entry(type(function)))
        elif isinstance(getattr(function, "__wrapped__", None), FunctionType):  # functools.cache
            self._function(function.__wrapped__)
        else:
            self._strict("function", _named(function), _named(function))

    def _object(self, owner: Any, entry: Any) -> None:
        """Read a callable object, or the object of a method: the class code that runs, and the attributes it
        reads.
        """
        kind = owner if isinstance(owner, type) else type(owner)
        self._allowed |= getattr(owner, MARK, frozenset())
        if not isinstance(entry, FunctionType):
            self._strict("function", _named(entry), _named(entry))
            return
        functions, read = _reached(kind, entry)
        self._code_of(functions)
        if isinstance(owner, nn.Module):
            for name, value in [*owner._parameters.items(), *owner._buffers.items(), *owner._modules.items()]:
                self._value("attribute", name, value)
        for name in sorted(read):
            found, value = _attribute(owner, name)
            if found:
                self._value("attribute", name, value)
        for function in functions:
            self._reads(function)

    def _reads(self, function: FunctionType, wrapped: Any = None) -> None:
        """Read the variables that a function uses."""
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if name != "__class__" and (wrapped is None or value is not wrapped):
                self._value("closure variable", name, value)
                self._attributes_read(function, name, value)
        for name in _globals_read(function.__code__):
            value = function.__globals__.get(name, function)
            beside = isinstance(value, FunctionType) and value.__globals__ is function.__globals__
            if value is not function and (beside or _is_simple(value)):
                self._value("global", name, value)
            else:
                self._attributes_read(function, name, value)

    def _attributes_read(self, function: FunctionType, name: str, value: Any) -> None:
        """Read the attributes of an object, such as a person's settings, that a function names.

        Others are not compared: settings of a framework have the rank too.
        """
        library = type(value).__module__.partition(".")[0] in LIBRARIES and type(value) not in RECORDS
        if (
            name in self._allowed
            or library
            or isinstance(value, (type, nn.Module))
            or _is_persons(type(value))
        ):
            return
        names = {n for c in _nested(function.__code__) for n in c.co_names}
        for attribute in sorted(names & getattr(value, "__dict__", {}).keys()):
            self._value("attribute", f"{name}.{attribute}", value.__dict__[attribute])

    def _code_of(self, functions: Sequence[FunctionType]) -> None:
        """Read the code of several functions together, which must be the same."""
        codes = [c for f in functions for c in _nested(f.__code__)]
        counts = [(c.co_argcount, c.co_posonlyargcount, c.co_kwonlyargcount, c.co_flags) for c in codes]
        bytecode = repr([(c.co_code, c.co_exceptiontable) for c in codes] + counts)
        self._strict("bytecode", bytecode, f"#{digest_text(bytecode)[:6]}")
        names = [(*c.co_names, *c.co_varnames, *c.co_freevars, *c.co_cellvars) for c in codes]
        self._strict("names", repr(names), ", ".join(n for ns in names for n in ns))
        constants = [self._described(k) for c in codes for k in c.co_consts if not isinstance(k, CodeType)]
        self._strict("constants", repr([t for t, _ in constants]), ", ".join(s for _, s in constants))
        given = [(n, v) for f in functions for n, v in _defaults(f) if n not in self._allowed]
        defaults = [(n, *self._described(v)) for n, v in given]
        self._strict(
            "defaults", repr([d[:2] for d in defaults]), ", ".join(f"{n}={s}" for n, _, s in defaults)
        )

    def _strict(self, name: str, content: str, shown: str) -> None:
        self.code.append(Trait(name, digest_text(content), _short(shown)))

    def _value(self, kind: str, name: str, value: Any) -> None:
        if name in self._allowed or len(self.values) > 4 * MAX_VALUES:
            return
        inside = self._inside(value)
        if inside is not None:
            content = repr(inside.code)
            self.values.append(Trait(f"{kind} {name!r}", digest_text(content), _coded(value, content)))
            self.values += [t._replace(name=f"{t.name} of {name!r}") for t in inside.values]
            return
        try:
            content, shown = self._described(value)
        except Exception:  # an error of the user's class must not stop one rank alone
            content, shown = _named(type(value)), f"an object of {_named(type(value))}"
        self.values.append(Trait(f"{kind} {name!r}", digest_text(content), _short(shown)))

    # -- values ------------------------------------------------------------------------------------------

    def _described(self, value: Any, depth: int = 0) -> tuple[str, str]:
        """The digest of a value, and the value as text."""
        kind = type(value).__name__
        if isinstance(value, Enum):
            return (f"{_named(type(value))}.{value.name}",) * 2
        if isinstance(value, PurePath) or (isinstance(value, str) and os.path.isabs(value)):
            return "path", "a path"
        if isinstance(value, (str, *SCALARS)):
            return f"{kind}:{value!r}", repr(value)
        if isinstance(value, TORCH_TYPES):
            return repr(value), repr(value)
        if isinstance(value, torch.device):
            return f"device {value.type}", value.type
        if isinstance(value, GENERATORS):
            return kind, f"a {kind}"
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self._module(value)
        if depth < MAX_DEPTH and isinstance(value, (list, tuple, set, frozenset, dict)):
            return self._container(value, depth + 1)
        inside = self._inside(value)
        if inside is not None:
            content = repr([*inside.code, *inside.values])
            return content, _coded(value, content)
        if hasattr(value, "__array_interface__") and hasattr(value, "shape"):  # numpy arrays
            return self._array(value)
        code = (type, BuiltinFunctionType, FunctionType, MethodType)
        name = _named(value) if isinstance(value, code) else _named(type(value))
        return name, name if callable(value) else f"an object of {name}"

    def _tensor(self, tensor: Tensor) -> tuple[str, str]:
        if id(tensor) in self._own:
            return "of the model", "a parameter of the model"
        about = f"{'x'.join(map(str, tensor.shape)) or 'scalar'} {str(tensor.dtype).removeprefix('torch.')}"
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.device.type != "cpu" or tensor.is_quantized:  # reading it would synchronize
            return f"tensor {about}", f"tensor {about}"
        sample = _sample(tensor)
        return (
            f"tensor {about} {sample}",
            f"tensor {about} {sample[: MAX_CHARACTERS // 2]} #{digest_text(sample)[:6]}",
        )

    def _array(self, array: Any) -> tuple[str, str]:
        about = f"{'x'.join(map(str, array.shape)) or 'scalar'} {array.dtype}"
        if array.dtype.kind not in "biufc":
            return f"array {about}", f"array {about}"
        sample = repr(array[tuple(i.numpy() for i in _places(array.shape))].tolist()) if array.size else "[]"
        return (
            f"array {about} {sample}",
            f"array {about} {sample[: MAX_CHARACTERS // 2]} #{digest_text(sample)[:6]}",
        )

    def _module(self, module: nn.Module) -> tuple[str, str]:
        name = _named(type(module))
        if any(id(one) in self._own for one in [*module.modules(), *module.parameters()]):
            return "of the model", "a module of the model"
        tensors = [*module.named_parameters(), *module.named_buffers()]
        content = repr((name, len(tensors), [(n, self._tensor(t)[0]) for n, t in tensors[:MAX_VALUES]]))
        return content, _coded(type(module), content)

    def _container(self, value: Any, depth: int) -> tuple[str, str]:
        items: Iterable[Any] = value.items() if isinstance(value, Mapping) else value
        found = [self._described(item, depth) for item in [*items][:MAX_ITEMS]]
        if isinstance(value, (set, frozenset, Mapping)):
            found.sort()
        shown = ", ".join(s for _, s in found)
        opening, closing = BRACKETS.get(type(value)) or (f"{type(value).__name__}(", ")")
        return f"{opening}{len(value)}: {[t for t, _ in found]}", f"{opening}{shown}{closing}"

    def _inside(self, value: Any) -> _TraitReader | None:
        """The reader for a value that is a function, or a callable object, of the user's code."""
        if not isinstance(value, (FunctionType, MethodType, partial)) and not _is_persons(type(value)):
            return None
        module = getattr(value, "__module__", None) or ""
        library = module.partition(".")[0] in LIBRARIES and not isinstance(value, (partial, nn.Module))
        if (
            isinstance(value, nn.Module)
            or library
            or id(value) in self._seen
            or self._level >= MAX_FUNCTION_LEVELS
        ):
            return None
        reader = _TraitReader(self._own, self._level + 1)
        reader._seen, reader._allowed = self._seen, self._allowed
        reader.written(value)
        return reader


def digest_text(content: str) -> str:
    """A digest of a text that is the same in every process."""
    return hashlib.sha256(content.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"


def _coded(value: Any, content: str) -> str:
    name = _named(value).rpartition("<locals>.")[2]
    return f"{name[-MAX_CHARACTERS + 10 :]} #{digest_text(content)[:6]}"


def _named(value: Any) -> str:
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(kind, '__module__', '') or ''}.{kind.__qualname__}".removeprefix("builtins.").strip(".")


def _entry(kind: type) -> Any:
    """The method that runs when an object of a class is called; `forward` for a module. None without one."""
    name = "forward" if issubclass(kind, nn.Module) else "__call__"
    return next((vars(c)[name] for c in kind.__mro__ if name in vars(c)), None)


def _is_persons(kind: type) -> bool:
    """Whether calls of a class's objects run Python code of the user, or of a module."""
    library = kind.__module__.partition(".")[0] in LIBRARIES and not issubclass(kind, nn.Module)
    return not library and isinstance(_entry(kind), FunctionType)


def _is_simple(value: Any, depth: int = 0) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return depth < MAX_DEPTH and all(_is_simple(v, depth + 1) for v in [*value][:MAX_ITEMS])
    if isinstance(value, dict):
        return depth < MAX_DEPTH and all(
            _is_simple(v, depth + 1) for kv in [*value.items()][:MAX_ITEMS] for v in kv
        )
    return isinstance(value, (str, Tensor, Enum, *SCALARS, *TORCH_TYPES))


def _sample(tensor: Tensor) -> str:
    """Some entries of a tensor, evenly spaced from the first to the last."""
    if not tensor.numel():
        return "[]"
    return repr(tensor.detach()[_places(tensor.shape)].resolve_conj().resolve_neg().tolist())


def _places(shape: Sequence[int]) -> tuple[Tensor, ...]:
    """The indices of evenly spaced entries of a tensor that is not empty."""
    if not shape:
        return ()
    count = prod(shape)
    places = sorted({i * (count - 1) // (MAX_SAMPLE - 1) for i in range(MAX_SAMPLE)})
    return torch.unravel_index(torch.tensor(places), tuple(shape))


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


@lru_cache(maxsize=512)
def _globals_read(code: CodeType) -> tuple[str, ...]:
    names = (
        i.argval
        for c in _nested(code)
        for i in dis.get_instructions(c)
        if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )
    return tuple(dict.fromkeys(names))


def _defaults(function: FunctionType) -> Iterator[tuple[str, Any]]:
    code, given = function.__code__, function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(given) : code.co_argcount], given, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _parameters(function: Any) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        return []


def _reached(kind: type, entry: FunctionType) -> tuple[list[FunctionType], set[str]]:
    """The methods that a method may call, itself first, and all names that they read."""
    found, read, todo = [entry], set[str](), [entry]
    while todo:
        for name in (n for c in _nested(todo.pop().__code__) for n in c.co_names if n not in read):
            read.add(name)
            method = inspect.getattr_static(kind, name, None)
            method = getattr(method, "__func__", None) or getattr(method, "fget", None) or method
            ours = isinstance(method, FunctionType) and not (method.__module__ or "").startswith("torch.")
            if isinstance(method, FunctionType) and ours and method not in found:
                found.append(method)
                todo.append(method)
    return found, read


def _attribute(owner: Any, name: str) -> tuple[bool, Any]:
    """Get an object's attribute without running code of its class."""
    try:
        value = inspect.getattr_static(owner, name)
    except AttributeError:
        return False, None
    if isinstance(value, MemberDescriptorType):  # a member of __slots__
        return (True, getattr(owner, name)) if hasattr(owner, name) else (False, None)
    unknown = (FunctionType, property, classmethod, staticmethod, ModuleType, GetSetDescriptorType)
    if name in getattr(owner, "__dict__", ()):  # the class attribute of that name is compared already
        return True, value
    return (False, None) if isinstance(value, unknown) else (True, value)
