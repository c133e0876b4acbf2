"""Dumps at work: what is taken on the way of a tensor, when an iteration begins and ends, who writes."""

from megatron_flex.runtime.dumps.describing import make_manifest
from megatron_flex.runtime.dumps.dumped import DumpSelection, DumpSink
from megatron_flex.runtime.dumps.dumping import SessionDumps
from megatron_flex.runtime.parameter_selection import select_parameters

__all__ = ["DumpSelection", "DumpSink", "SessionDumps", "select_parameters", "make_manifest"]
