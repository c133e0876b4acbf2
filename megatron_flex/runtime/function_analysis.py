"""What the bytecode of an editing function tells: arguments it reads, what it calls, likely mistakes."""

from __future__ import annotations

import builtins
import dis
import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_flex.errors import FlexWarning
from megatron_flex.runtime.edit_traits import changes_by_pass, traits_of

# -- arguments ------------------------------------------------------------------------------------------

INTROSPECTION = {"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe"}
STORE_OPCODES = {"STORE_FAST", "DELETE_FAST"}
MODULE_ARGUMENT, CONTEXT_ARGUMENT, MODULES_ARGUMENT = 0, 2, 3  # indices in an editing function's arguments


def uses_context(edit: Any) -> bool:
    """Whether an editing function may use `save_ctx`."""
    declared = traits_of(edit).uses_context
    return uses_argument(edit, CONTEXT_ARGUMENT) if declared is None else declared


def uses_argument(fn: Any, index: int) -> bool:
    """Whether a function may read one of its positional arguments.

    Determined from the bytecode of plain functions, lambdas, methods, and partials of these. Conservative:
    anything else, and a function that could access its variables indirectly, counts as using the argument.

    Args:
        fn: the callable.
        index: the argument's position in the call, from 0.
    """
    if isinstance(fn, partial):
        return uses_argument(fn.func, index + len(fn.args))
    if isinstance(fn, MethodType):
        return uses_argument(fn.__func__, index + 1)
    if not isinstance(fn, FunctionType):
        return True
    code = fn.__code__
    if index >= code.co_argcount:
        return bool(code.co_flags & inspect.CO_VARARGS)
    name = code.co_varnames[index]
    return name in code.co_cellvars or bool(INTROSPECTION & set(code.co_names)) or _reads_local(code, name)


def _reads_local(code: CodeType, name: str) -> bool:
    """Whether an instruction reads a local variable; some instructions read two."""
    return any(
        i.argval == name or (isinstance(i.argval, tuple) and name in i.argval)
        for i in dis.get_instructions(code)
        if i.opname not in STORE_OPCODES and "FAST" in i.opname
    )


def unwrap_function(edit: Any) -> FunctionType | None:
    """The Python function inside a partial, a bound method, a module or another callable object."""
    while isinstance(edit, partial) or "function" in getattr(edit, "__dict__", ()):
        edit = edit.func if isinstance(edit, partial) else vars(edit)["function"]
    if isinstance(edit, nn.Module):
        edit = edit.forward
    elif not isinstance(edit, (FunctionType, MethodType)):
        edit = getattr(type(edit), "__call__", edit)  # noqa: B004
    edit = getattr(edit, "__func__", edit)
    return edit if isinstance(edit, FunctionType) else None


# -- what a function calls ------------------------------------------------------------------------------

Instructions = list[dis.Instruction]
UNRESOLVED = object()


class Reference(NamedTuple):
    """A name in the bytecode, with its value if it is a variable, or an attribute of a module."""

    name: str
    value: Any
    line: int


@lru_cache(maxsize=512)
def _read_instructions(code: CodeType) -> Instructions:
    return [i for i in dis.get_instructions(code) if i.opname != "CACHE"]


def _references(function: FunctionType) -> Iterator[Reference]:
    """The variables and attributes that a function reads, modules apart."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    owner: Any = UNRESOLVED
    for step in _read_instructions(function.__code__):
        name, line = step.argval, (step.positions.lineno if step.positions else None) or 0
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            owner = function.__globals__.get(name, getattr(builtins, name, UNRESOLVED))
        elif step.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF"):
            owner = _cell_value(cells[name]) if name in cells else UNRESOLVED
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            owner = getattr(owner, name, UNRESOLVED) if isinstance(owner, ModuleType) else UNRESOLVED
        else:
            if step.opname not in ("PUSH_NULL", "EXTENDED_ARG"):
                owner = UNRESOLVED
            continue
        if not isinstance(owner, ModuleType):
            yield Reference(name, owner, line)


def _cell_value(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return UNRESOLVED


# Opcodes that write to other objects, run other code, or leave the function with anything but a tensor.
EFFECTS: tuple[str, ...] = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "STORE_ATTR", "DELETE_ATTR")
EFFECTS += ("DELETE_SUBSCR", "IMPORT_", "MAKE_FUNCTION", "LOAD_BUILD_CLASS", "YIELD_VALUE")
EFFECTS += ("RETURN_GENERATOR", "LOAD_SUPER_ATTR")
COMPUTING = {"len", "range", "min", "max", "abs", "sum", "int", "float", "bool", "tuple", "list", "slice"}
COMPUTING |= {"enumerate", "zip", "isinstance", "reversed", "round"}  # builtins
COMPUTING |= {"shape", "dtype", "device", "ndim", "is_cuda", "requires_grad", "T", "mT", "H", "mH"}
COMPUTING |= {"tolist", "half", "bfloat16", "double", "long"}
# Operators, of torch and of its scripts, with other effects.
OTHERS = {"backward", "retain_grad", "requires_grad_", "set_", "set_grad_enabled", "save"}
OTHERS |= {"seed", "manual_seed", "initial_seed", "Generator"}
MODULES = (torch, torch.nn.functional, torch.linalg, torch.fft, torch.special, torch.functional)
NUMBERS = (int, float, complex, str, bytes, type(None), type(Ellipsis), slice, torch.dtype, torch.device)
RANDOM_BY_NAME = {"fractional_max_pool2d", "fractional_max_pool3d"}  # that draw samples for an operator
RANDOM_BY_NAME |= {f"{name}_with_indices" for name in RANDOM_BY_NAME}


class Operators(NamedTuple):
    """What a function calls that calls nothing but operators of torch, and reads nothing but constants.

    Attributes:
        names: the operators.
        constants: whether it reads tensors besides its input.
        in_place: whether it writes to tensors.
    """

    names: frozenset[str]
    constants: bool
    in_place: bool


def read_operators(edit: Any) -> Operators | None:
    """Read what an editing function calls; None if it may do anything else.

    A function is read as it is now; later changes of what its names refer to are not seen.
    """
    bound: list[Any] = []
    # Inside partials and `mf.local`; what a partial binds shifts the places of the arguments.
    function, shift = edit, 0
    while isinstance(function, partial) or "function" in getattr(function, "__dict__", ()):
        if isinstance(function, partial):
            bound += [*function.args, *function.keywords.values()]
            shift += len(function.args)
        function = function.func if isinstance(function, partial) else vars(function)["function"]
    if not isinstance(function, FunctionType):
        return None
    bound += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if any(uses_argument(function, n + shift) for n in (MODULE_ARGUMENT, CONTEXT_ARGUMENT, MODULES_ARGUMENT)):
        return None
    steps = _read_instructions(function.__code__)
    if any(s.opname.startswith(EFFECTS) for s in steps) or _loops_freely(steps):
        return None
    names: set[str] = set()
    for reference in _references(function):
        if reference.value is UNRESOLVED or callable(reference.value):
            name = getattr(reference.value, "__name__", reference.name)
            if not _is_operator(name, reference):
                return None
            names.add(name)
        else:
            bound.append(reference.value)
    if not all(isinstance(b, (Tensor, *NUMBERS)) or _is_numbers(b) for b in bound):
        return None
    # A call's keywords are a tuple among the constants.
    keywords = [s.argval for s in steps if s.opname in ("KW_NAMES", "LOAD_CONST") and type(s.argval) is tuple]
    writes = any(n.endswith("_") for n in names) or any({"out", "inplace"} & {*map(str, k)} for k in keywords)
    writes |= any(s.opname == "STORE_SUBSCR" or (s.opname == "BINARY_OP" and "=" in s.argrepr) for s in steps)
    return Operators(frozenset(names), any(isinstance(b, Tensor) for b in bound), writes)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(v, NUMBERS) for v in value)


def _loops_freely(steps: Instructions) -> bool:
    """Whether there is a loop that does not iterate, which may never end."""
    heads = {s.offset for s in steps if s.opname == "FOR_ITER"}
    return any("JUMP_BACKWARD" in s.opname and s.argval not in heads for s in steps)


def _is_operator(name: str, reference: Reference) -> bool:
    value, known = reference.value, name in COMPUTING
    known = known or (hasattr(torch.ops.aten, name) and name not in OTHERS)
    if value is UNRESOLVED:
        return known and (name in COMPUTING or hasattr(Tensor, name))
    home = getattr(value, "__module__", "") or ""
    if home in ("builtins", "math"):
        error = isinstance(value, type) and issubclass(value, Exception)
        return error or name in COMPUTING or getattr(math, name, None) is value
    return known and any(vars(m).get(n) is value for m in MODULES for n in (name, reference.name))


def draws_random_numbers(edit: Callable[..., Any]) -> bool:
    """Whether an editing function may draw random numbers: it declares it, or the tags of operators tell."""
    declared = traits_of(edit).uses_random_numbers
    if declared is not None:
        return declared
    if changes_by_pass(edit):
        return True
    called = read_operators(edit)
    return called is None or any(_may_draw(name) for name in called.names - COMPUTING)


def _may_draw(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or name in RANDOM_BY_NAME:
        return not hasattr(math, name) and not name.endswith(("Error", "Exception"))
    tag = torch.Tag.nondeterministic_seeded
    return any(tag in getattr(packet, overload).tags for overload in packet.overloads())


def computes_only(edit: Callable[..., Any]) -> bool:
    """Whether a call has no effect but its result, which depends on the tensor alone."""
    called = read_operators(edit)
    return called is not None and not (called.in_place and called.constants)


# -- likely mistakes ------------------------------------------------------------------------------------

ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"}
ENDS |= {"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"}
NO_TENSOR = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
SYNCHRONIZING = {"item", "tolist", "cpu", "numpy"}  # methods that synchronize host and device
SYNCHRONIZES = "makes the host wait for the GPU at each microbatch; compute with tensors, or read with a hook"
COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_coalesced", "all_reduce"),
    *("all_gather_single", "reduce_scatter_single"),
    *("all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast"),
    *("broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier", "new_group"),
    *("recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send"),
}


class Mistake(NamedTuple):
    """A likely mistake, and its line in the source."""

    text: str
    line: int


def find_mistakes(function: FunctionType, on_gpu: bool, once: bool) -> list[Mistake]:
    """Find likely mistakes.

    Args:
        function: the editing function.
        on_gpu: whether the model is on a device with asynchronous execution.
        once: whether one rank runs the function for all.
    """
    code = function.__code__
    if code.co_flags & NO_TENSOR:
        text = "it is a generator or coroutine and returns no tensor; return one"
        mistakes = [Mistake(text, code.co_firstlineno)]
    else:
        text = "it can return None here; return a tensor on every path"
        mistakes = [Mistake(text, line) for line in none_lines(code)]
    why = "only one rank runs it, so the others never come"
    if not once:
        why = "if one rank does not reach this call, the other ranks hang"
    for name, value, line in _references(function):
        home = getattr(value, "__module__", "") or ""
        if value is UNRESOLVED and name in SYNCHRONIZING and on_gpu:
            mistakes.append(Mistake(f".{name}() {SYNCHRONIZES}", line))
        elif name in COLLECTIVES and home.startswith("torch.distributed"):
            text = f"torch.distributed.{name}() in an edit: {why}; the tensor is whole already"
            mistakes.append(Mistake(text, line))
    return mistakes


def none_lines(code: CodeType) -> list[int]:
    """The lines that may return None: the instructions that can be reached, and return it."""
    steps = _read_instructions(code)
    index = {s.offset: n for n, s in enumerate(steps)}
    entries = vars(dis.Bytecode(code))["exception_entries"]
    handlers = [(e.start, e.end, index[e.target]) for e in entries]
    # A context manager could suppress an error; nearly none does.
    handlers = [h for h in handlers if "WITH_EXCEPT_START" not in {s.opname for s in steps[h[2] : h[2] + 2]}]
    lines, reached, todo = set[int](), set[int](), [0]
    while todo:
        n = todo.pop()
        if n in reached:
            continue
        reached.add(n)
        step = steps[n]
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            todo.append(index[step.argval])
        todo += [target for start, end, target in handlers if start <= step.offset < end]
        if step.opname not in ENDS:
            todo.append(n + 1)
        loaded = steps[n - 1] if step.opname == "RETURN_VALUE" else step
        constant = loaded.opname in ("RETURN_CONST", "LOAD_CONST") and step.opname.startswith("RETURN")
        if constant and loaded.argval is None:
            lines.add((step.positions.lineno if step.positions else None) or code.co_firstlineno)
    return sorted(lines)


def warn_of_mistakes(edit: Callable[..., Any], name: Callable[[], str], on_gpu: bool, once: bool) -> None:
    """Warn of likely mistakes in an editing function, at their lines.

    Args:
        edit: the function.
        name: returns the name of the hook.
        on_gpu: as in `find_mistakes`.
        once: as in `find_mistakes`.
    """
    function = unwrap_function(edit)
    for text, line in [] if function is None else find_mistakes(function, on_gpu, once):
        assert function is not None
        place = function.__code__.co_filename, line
        warnings.warn_explicit(f"hook ({name()}): {text}", FlexWarning, *place)
