"""The first value of a step that is not finite: what is watched, where the value is, and the verdict."""

from megatron_flex.nonfinite.nonfinite_settings import NonFinite
from megatron_flex.nonfinite.pass_ranges import Located, PassRange
from megatron_flex.nonfinite.verdict import Candidate, Neighbourhood, Verdict, reach_verdict

__all__ = [
    "Candidate",
    "Located",
    "Neighbourhood",
    "NonFinite",
    "PassRange",
    "Verdict",
    "reach_verdict",
]
