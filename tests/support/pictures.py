"""Screenshots against kept ones, by their structure: letters may have another shape, panes may not move.

Both pictures are blurred and made smaller, so that a cell is the mean of what is around some letters, and the
share of cells that differ is what counts. Fonts of other machines change few cells, and those by little.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

KEPT = Path(__file__).parents[1] / "browser" / "kept"
AGAIN = "FLEX_KEEP"  # set it to write the pictures anew; then look at them
CELL = 12  # pixels that become one, each way
BLUR = 6.0  # pixels
STEP = 20  # of 255: what a cell may differ by in any channel
SHARE = 0.08  # of the cells may differ by more; another font family makes 0.062, another theme 0.96
COLOURS = 96  # of what is kept, so that it is small


def cells(picture: bytes | Path) -> Any:
    """A picture, blurred and made smaller: `[rows, columns, 3]`."""
    import numpy as np
    from PIL import Image, ImageFilter

    image = Image.open(io.BytesIO(picture) if isinstance(picture, bytes) else picture).convert("RGB")
    image = image.filter(ImageFilter.GaussianBlur(BLUR))
    small = image.resize((image.width // CELL, image.height // CELL), Image.Resampling.BOX)
    return np.asarray(small).astype(int)


def apart(one: bytes | Path, other: bytes | Path) -> float:
    """The share of cells that differ; all of them if the sizes do."""
    first, second = cells(one), cells(other)
    if first.shape != second.shape:
        return 1.0
    return float((abs(first - second).max(-1) > STEP).mean())


def small(picture: bytes, colours: int = COLOURS) -> bytes:
    """The same as a PNG of few colours."""
    from PIL import Image

    image = Image.open(io.BytesIO(picture)).convert("RGB")
    out = io.BytesIO()
    # No dithering: it makes noise, which neither eyes nor PNG like.
    image.quantize(colours, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(
        out, "PNG", optimize=True
    )
    return out.getvalue()


def difference(one: bytes | Path, other: bytes | Path) -> bytes:
    """Cells that differ in red, the others as grey as they differ; as a PNG."""
    import numpy as np
    from PIL import Image

    first, second = cells(one), cells(other)
    rows, columns = (min(a, b) for a, b in zip(first.shape[:2], second.shape[:2], strict=True))
    far = abs(first[:rows, :columns] - second[:rows, :columns]).max(-1)
    shown = np.repeat(np.minimum(4 * far, 255)[..., None], 3, -1).astype(np.uint8)
    shown[far > STEP] = (220, 30, 30)
    out = io.BytesIO()
    Image.fromarray(shown).resize((columns * CELL, rows * CELL), Image.Resampling.NEAREST).save(out, "PNG")
    return out.getvalue()


def kept(name: str, picture: bytes, folder: Path, where: Path = KEPT) -> None:
    """Hold a screenshot to the one that is kept under that name.

    Args:
        name: without `.png`.
        picture: PNG.
        folder: where a picture that differs is written, with the difference.
        where: the folder of the kept ones.

    Raises:
        AssertionError: it differs, or none is kept.
    """
    path = where / f"{name}.png"
    if os.environ.get(AGAIN):
        path.write_bytes(small(picture))
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"{name}-new.png"
    if not path.is_file():
        new.write_bytes(picture)
        raise AssertionError(f"{path.name} is not kept; the new one is {new}; {AGAIN}=1 keeps it")
    share = apart(path, picture)
    if share > SHARE:
        new.write_bytes(picture)
        (folder / f"{name}-difference.png").write_bytes(difference(path, picture))
        raise AssertionError(
            f"{path.name} differs in {share:.1%} of its cells, at most {SHARE:.0%} may: see "
            f"{name}-new.png and {name}-difference.png in {folder}; {AGAIN}=1 keeps the new one"
        )
