"""Screenshots against kept ones, by their structure: letters may have another shape, panes may not move.

Both pictures are blurred and made smaller, so that a cell is the mean of what is around some letters, and the
share of cells that differ is what counts. Where texts are as wide as they were, it is the same font, and next
to nothing may differ: a pane that is lost or empty is noticed. Fonts of other machines change more, and a
picture is then held for its theme and its greater parts only.
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
STEP = 20  # of 255: what a cell may differ by in any channel, where fonts differ
SHARE = 0.08  # of the cells may differ by more; another font family makes 0.062, another theme 0.96
SAME_STEP, SAME_SHARE = 8, 0.003  # where fonts are the same
COLOURS = 160  # of what is kept, so that it is small
FONTS = "fonts"  # under which a kept picture has the widths of its texts


def cells(picture: bytes | Path) -> Any:
    """A picture, blurred and made smaller: `[rows, columns, 3]`."""
    import numpy as np
    from PIL import Image, ImageFilter

    image = Image.open(io.BytesIO(picture) if isinstance(picture, bytes) else picture).convert("RGB")
    image = image.filter(ImageFilter.GaussianBlur(BLUR))
    small = image.resize((image.width // CELL, image.height // CELL), Image.Resampling.BOX)
    return np.asarray(small).astype(int)


def apart(one: bytes | Path, other: bytes | Path, step: int = STEP) -> float:
    """The share of cells that differ by more than `step`; all of them if the sizes do."""
    first, second = cells(one), cells(other)
    if first.shape != second.shape:
        return 1.0
    return float((abs(first - second).max(-1) > step).mean())


def small(picture: bytes, colours: int = COLOURS, fonts: str = "") -> bytes:
    """The same as a PNG of few colours, which has what is said of its fonts."""
    from PIL import Image, PngImagePlugin

    told = PngImagePlugin.PngInfo()
    told.add_text(FONTS, fonts)
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    out = io.BytesIO()
    # No dithering: it makes noise, which neither eyes nor PNG like.
    image.quantize(colours, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(
        out, "PNG", optimize=True, pnginfo=told
    )
    return out.getvalue()


def fonts_of(path: Path) -> str:
    """What a kept picture says of its fonts."""
    from PIL import Image

    with Image.open(path) as image:
        return str(image.info.get(FONTS, ""))


def difference(one: bytes | Path, other: bytes | Path, step: int = STEP) -> bytes:
    """Cells that differ in red, the others as grey as they differ; as a PNG."""
    import numpy as np
    from PIL import Image

    first, second = cells(one), cells(other)
    rows, columns = (min(a, b) for a, b in zip(first.shape[:2], second.shape[:2], strict=True))
    far = abs(first[:rows, :columns] - second[:rows, :columns]).max(-1)
    shown = np.repeat(np.minimum(4 * far, 255)[..., None], 3, -1).astype(np.uint8)
    shown[far > step] = (220, 30, 30)
    out = io.BytesIO()
    Image.fromarray(shown).resize((columns * CELL, rows * CELL), Image.Resampling.NEAREST).save(out, "PNG")
    return out.getvalue()


def kept(name: str, picture: bytes, folder: Path, where: Path = KEPT, fonts: str = "") -> None:
    """Hold a screenshot to the one that is kept under that name.

    Args:
        name: without `.png`.
        picture: PNG.
        folder: where a picture that differs is written, with the difference.
        where: the folder of the kept ones.
        fonts: the widths of some texts; where the kept picture has the same, less may differ.

    Raises:
        AssertionError: it differs, or none is kept.
    """
    path = where / f"{name}.png"
    if os.environ.get(AGAIN):
        path.write_bytes(small(picture, fonts=fonts))
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"{name}-new.png"
    if not path.is_file():
        new.write_bytes(picture)
        raise AssertionError(f"{path.name} is not kept; the new one is {new}; {AGAIN}=1 keeps it")
    same = fonts != "" and fonts == fonts_of(path)
    step, most = (SAME_STEP, SAME_SHARE) if same else (STEP, SHARE)
    share = apart(path, picture, step)
    if share > most:
        new.write_bytes(picture)
        (folder / f"{name}-difference.png").write_bytes(difference(path, picture, step))
        raise AssertionError(
            f"{path.name} differs in {share:.1%} of its cells, at most {most:.1%} may: see "
            f"{name}-new.png and {name}-difference.png in {folder}; {AGAIN}=1 keeps the new one"
        )
