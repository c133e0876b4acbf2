"""docs/glossary.md shows layouts and meshes as they are printed."""

from __future__ import annotations

import re

from megatron_flex.layout import Cut, Dim, Layout, PackedSequences
from megatron_flex.mesh import Axis, Mesh
from tests.support import pages

PAGE = pages.ROOT / "docs" / "glossary.md"
S, B, H = Dim("s"), Dim("b"), Dim("h")


def test_the_notation_of_layouts() -> None:
    (shown,) = pages.mine(PAGE, "text")
    printed = [re.split(r" {2,}", line)[0] for line in shown.splitlines()]
    zigzag, tp = Cut("cp", "zigzag"), Cut("tp")
    layouts = (
        Layout((S, B, H)),
        Layout((Dim("s", (tp,)), B, H)),
        Layout((Dim("s", (zigzag,)), B, H)),
        Layout((Dim("s", (zigzag, tp)), B, H)),
        PackedSequences.of([0, 8, 16]).layout_of(Layout((Dim("s", (zigzag,)), B, H))),
        Layout((S, B, Dim("gate|up", (tp,), segments=(1, 1)))),
        Layout((S, B, Dim("g", (Cut("tp", copies=2),)), Dim("d"))),
        Layout((S, B, H), partial=("tp",)),
    )
    assert printed == [layout.describe() for layout in layouts]


def test_the_notation_of_meshes() -> None:
    mesh = Mesh((Axis("pp", 2, ranks=(0, 4)), Axis("dp"), Axis("tp", 4, ranks=(0, 1, 2, 3))))
    assert f"`{mesh.describe()}`" in PAGE.read_text(encoding="utf-8")
