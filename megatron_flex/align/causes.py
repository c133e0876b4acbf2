"""Likely causes of the first difference."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any
class Evidence:
    def __init__(self, *a): pass
def find_causes(e): return []
