"""Real distributed bugs, each a few lines of monkey patch on the ranks of a run of a small Megatron GPT.

A patch stands in Megatron or in the loop around it, as the bug would; nothing of the library is touched.
Where a bug is a matter of degree, its magnitude is a parameter.
"""

from tests.support.bugs.arithmetic import ARITHMETIC
from tests.support.bugs.bug import Bug
from tests.support.bugs.experts import EXPERTS_AND_STEPS
from tests.support.bugs.spread import SPREAD
from tests.support.bugs.tensor import TENSOR

BUGS = [*TENSOR, *ARITHMETIC, *SPREAD, *EXPERTS_AND_STEPS]
BY_NAME = {bug.name: bug for bug in BUGS}

__all__ = ["BUGS", "BY_NAME", "Bug"]
