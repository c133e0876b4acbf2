"""What can be known of a person's function without running it."""

from __future__ import annotations

import dis
import inspect
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

INTROSPECTION = {"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe"}
STORE_OPCODES = {"STORE_FAST", "DELETE_FAST"}


CONTEXT_ARGUMENT = 2  # the place of `save_ctx` among an editing function's arguments


def uses_context(edit: Any) -> bool:
    """Whether an editing function may use `save_ctx`; one with an attribute `asks_context` says so itself."""
    answer = getattr(edit, "asks_context", None)
    return uses_argument(edit, CONTEXT_ARGUMENT) if answer is None else bool(answer)


def uses_argument(fn: Any, index: int) -> bool:
    """Whether a function may look at an argument that it is given by position.

    Read off the bytecode of plain functions, lambdas, methods, and partials of these. It errs on one side:
    anything else, and a function that could see its variables otherwise, counts as using it.

    Args:
        fn: what would be called.
        index: the argument's place in the call, from 0.
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
    """Whether an instruction reads a local variable; one that reads two names both."""
    return any(
        i.argval == name or (isinstance(i.argval, tuple) and name in i.argval)
        for i in dis.get_instructions(code)
        if i.opname not in STORE_OPCODES and "FAST" in i.opname
    )
