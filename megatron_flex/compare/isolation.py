"""Isolated steps: the parameters of a dumped run, loaded into a model of any layout.

After some optimizer steps two correct runs have other parameters, and what reads them differs by more than
round-off. A run that starts a step with the parameters of the other has only that step's own differences.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

from megatron_flex.dump.reader import OpenDump, open_dump
from megatron_flex.errors import DumpError

if TYPE_CHECKING:
    from megatron_flex.model import FlexModel


def load_parameters(
    flex: FlexModel, dump: OpenDump | str | PathLike[str], iteration: int, *, optimizer: Any = None
) -> list[str]:
    """Load the parameters with which a dumped run began an iteration: an isolated step.

    Every rank calls it, outside of a step, and reads the dump; one full parameter is in memory at a time. The
    dump's run may have had any layout. Dump the step that follows under the same iteration number, and
    compare it alone: `compare(a, b, iterations=[iteration])`.

    Args:
        flex: the model to load into, a `FlexModel`.
        dump: the dump, or its path, made with `parameters="**"`.
        iteration: the iteration whose parameters to load; they are dumped at its start.
        optimizer: as for `FlexModel.set_module_parameter`: its own copies are set as well.

    Returns:
        The names of the loaded parameters.

    Raises:
        DumpError: the dump has no parameters, or not that iteration.
        SiteError: on all ranks: the model has no such parameter.
        FlexError: on all ranks: another shape or dtype.

    Examples:
        >>> from megatron_flex.compare.isolation import load_parameters
        >>> with attach(chunks, dumps=Dump("dumps/new", parameters="**")):
        ...     train_step(chunks)
        >>> len(load_parameters(flex, "dumps/new", 0))
        27
    """
    if not isinstance(dump, OpenDump):
        with open_dump(dump) as opened:
            return load_parameters(flex, opened, iteration, optimizer=optimizer)
    names = dump.parameters
    if not names:
        raise DumpError(f'{dump.path} has no parameters; dump them with parameters="**"', path=dump.path)
    for number, name in enumerate(names):
        array = dump.parameter(name)
        if iteration not in array.iterations:
            known = f"{array.iterations[0]} to {array.iterations[-1]}" if array.iterations else "none"
            raise DumpError(
                f"{dump.path} does not have {name} in iteration {iteration}; it has {known}", path=dump.path
            )
        last = number == len(names) - 1
        value = array.at(iteration)[0].torch()
        flex.set_module_parameter(name, value, optimizer=optimizer if last else None)
    return list(names)
