"""Random damages of dumps of every kind, read on a random road: a value is right, or an error.

python -m tests.support.dump_fuzz --minutes 10 --seed 0
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from megatron_flex.dump.tools.dump_verification import verify_dump
from megatron_flex.errors import DumpError
from tests.support.dump_roads import KINDS, Outcome, roads


def damaged(draw: random.Random, body: bytes) -> bytes:
    """Other bytes: one bit, a run of zeros, a piece from elsewhere, or an end that is gone."""
    out, at = bytearray(body), draw.randrange(len(body))
    way = draw.choice(("bit", "bit", "zeros", "copied", "cut"))
    if way == "bit":
        out[at] ^= 1 << draw.randrange(8)
    elif way == "zeros":
        out[at : at + 64] = bytes(len(out[at : at + 64]))
    elif way == "copied":
        size = min(draw.randrange(1, 4096), len(out) - at)
        first = draw.randrange(len(out) - size + 1)
        out[at : at + size] = body[first : first + size]
    else:
        del out[at:]
    return bytes(out)


def wrong(right: Outcome, found: Outcome) -> list[str]:
    """The values that are neither right nor an error."""
    return [
        name
        for name, value in found.items()
        if not isinstance(value, DumpError)
        and (name not in right or not torch.equal(value, torch.as_tensor(right[name])))
    ]


def main() -> int:
    """Damage dumps until the time is over; 1 if a road gave a wrong value, or verify found nothing."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    draw, counts, failures = random.Random(flags.seed), Counter[str](), []
    end = time.monotonic() + 60 * flags.minutes
    with tempfile.TemporaryDirectory() as folder:
        scratch, good = Path(folder) / "scratch", Path(folder) / "good"
        right: dict[tuple[str, str], Outcome] = {}
        for kind, make in KINDS.items():
            make(good / kind)
        while time.monotonic() < end:
            kind = draw.choice(list(KINDS))
            path = Path(folder) / "damaged"
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(good / kind, path)
            file = draw.choice(sorted(p for p in path.rglob("*") if p.is_file()))
            before = file.read_bytes()
            after = damaged(draw, before)
            file.write_bytes(after)
            counts["damages"] += before != after
            road, read = draw.choice(list(roads(good / kind, slow=False).items()))
            counts[road] += 1
            for name in (scratch,):
                shutil.rmtree(name, ignore_errors=True)
                name.mkdir()
            if (kind, road) not in right:
                right[kind, road] = read(good / kind, scratch)
                shutil.rmtree(scratch)
                scratch.mkdir()
            told = f"{kind} {file.relative_to(path)} {road}"
            try:
                bad = wrong(right[kind, road], read(path, scratch))
            except DumpError:
                counts["refused as a whole"] += 1
                bad = []
            if before != after:
                failures += [f"{told}: {name}" for name in bad]
                if verify_dump(path).good:
                    failures.append(f"{told}: verify found nothing")
    print(dict(counts))
    print("\n".join(failures) or "no road gave a wrong value, and verify found every damage")
    return bool(failures)


if __name__ == "__main__":
    raise SystemExit(main())
