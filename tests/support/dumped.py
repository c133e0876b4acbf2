"""Dumps of real runs in tests: what the ranks write, and how that compares with one process."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_flex.dump.schema import layout_from_json
from tests.distributed.matrix import Cell, relative
from tests.support import gpt, moe, oracle, ranks, truths
from tests.support.dumps import healthy

ALL = "**:*"


def dumping(case: gpt.Case, state: dict[str, Tensor] | None, path: str, settings: dict[str, Any]) -> Any:
    """What one rank does: a step without a dump, then one with it.

    Returns:
        `plain` and `dumped`: the losses and parameter gradients of each.
    """
    import megatron_flex as mf

    chunks = ranks.start(case)
    if state is not None:
        gpt.load(chunks, state)
    rank, answer = ranks.mine(chunks), {}
    answer["plain"] = gpt.step(case, chunks, rank), gradients(chunks)
    with warnings.catch_warnings():
        warnings.simplefilter("error", mf.FlexWarning)
        with mf.attach(chunks, dumps=mf.Dump(path, **{"sites": ALL, "order": "blocks", **settings})) as flex:
            answer["hidden"] = {s.name: s.hidden for s in flex.sites() if s.hidden}
            answer["dumped"] = gpt.step(case, chunks, rank), gradients(chunks)
    return answer


def gradients(chunks: list[Any]) -> dict[str, Tensor]:
    """This rank's parameter gradients, copied."""
    return {
        f"{number}.{name}": p.grad.clone()
        for number, root in enumerate(chunks)
        for name, p in root.named_parameters()
        if p.grad is not None
    }


def changed(answers: Sequence[dict[str, Any]], bound: float = 0.0) -> list[str]:
    """What in a run with a dump was not, bit for bit, as in the one without: losses, gradients by name.

    A gradient may differ by `bound` of its greatest entry.
    """
    out = []
    for a in answers:
        (losses, before), (also, behind) = a["plain"], a["dumped"]
        out += [] if losses == also else ["losses"]
        out += sorted(before.keys() ^ behind.keys())
        for name, gradient in before.items():
            if not torch.equal(gradient, behind[name]) and relative(behind[name], gradient) > bound:
                out.append(name)
    return out


def bitwise(site: Any) -> bool:
    """All sites but inputs of norms on the residual stream.

    What a norm and the residual give the stream is summed with the norm's two summands first where its own
    gradient is wanted, and last where it is not.
    """
    return not site.name.endswith(("input_layernorm:input", "pre_mlp_layernorm:input"))


def as_written(tensor: Tensor, dims: Sequence[str], inferred: bool = False) -> Tensor:
    """A microbatch's full tensor as an array of a dump has it: `[sample, token, ...]`.

    Of a module with no declared layout the first dim counts as samples. Mimo's projector has no batch dim.
    """
    if inferred:
        return tensor
    if tensor.ndim == len(dims) - 1:
        dims = [n for n in dims if n != "b"]
    front = [dims.index(n) for n in ("b", "s") if n in dims]
    out = tensor.permute(*front, *(i for i in range(tensor.ndim) if i not in front))
    return out if "b" in dims else out[None]


def against_truth(case: gpt.Case, path: str | Path, sites: list[str], truth: dict[str, Any]) -> list[Cell]:
    """Every value and gradient of a dump's only iteration, against one process."""
    import megatron_flex as mf

    found = []
    healthy(path)
    with mf.open_dump(path) as dump:
        places = {s.name: s for s in dump.manifest.sites}
        for site in sites:
            layout = layout_from_json(dict(places[site].layout))
            order = range(len(layout.dims)) if layout.permute is None else layout.permute
            dims = [layout.dims[i].name for i in order]
            for check, name, wanted in (
                ("dump", site, truth["values"].get(site)),
                ("dump of gradients", f"{site}.grad", truth["gradients"].get(site)),
            ):
                if wanted is None or (check != "dump" and moe.read_only(site)):
                    continue
                # at a microbatch's own loss, of which one process makes the mean over all microbatches
                scale = len(truth["losses"]) if check != "dump" else 1
                inferred = places[site].inferred
                written = [as_written(w * scale if scale > 1 else w, dims, inferred) for w in wanted]
                calls = max(1, len(written) // len(truth["losses"]))  # in a microbatch
                for call in range(calls):
                    got = (dump[name, call] if calls > 1 else dump[name]).torch()[0]
                    error = relative(got, torch.cat(written[call::calls]))
                    found.append(Cell(case.name, site, check, error, model=case.model))
    return found


def against_twin(case: gpt.Case, path: str | Path, twin: str | Path) -> list[Cell]:
    """Every array of a dump, against that of the same data in a run of one process."""
    import megatron_flex as mf

    found = []
    healthy(path)
    healthy(twin)
    with mf.open_dump(path) as dump, mf.open_dump(twin) as single:
        assert dump.sites == single.sites
        calls = calls_of(twin)
        for name in dump.sites:
            several = len(calls[name]) > 1
            for key in [(name, call) for call in sorted(calls[name])] if several else [name]:
                error = relative(dump[key].torch(), single[key].torch())
                found.append(Cell(case.name, name, "dump and tp1's dump", error, model=case.model))
    return found


def calls_of(path: str | Path) -> dict[str, set[int]]:
    """The calls in a microbatch of each array of a dump."""
    out: dict[str, set[int]] = {}
    for written in entries(Path(path)):
        out.setdefault(written.name, set()).add(written.entry.call)
    return out


def truth_of(case: gpt.Case) -> dict[str, Any]:
    """The single-process run, with every site watched."""
    return truths.of(case.single(), oracle.sites_of(case), [])


class Written(NamedTuple):
    """An entry of a part, by whom it was written, and the bytes of its tensor."""

    rank: int
    coords: Mapping[str, int]
    entry: Any
    layout: dict[str, Any]
    nbytes: int

    @property
    def name(self) -> str:
        """Of the array that it is a part of."""
        own: str = self.entry.site
        return f"{own}.grad" if self.entry.kind.endswith("gradient") else own


def entries(path: Path) -> list[Written]:
    """All entries of all parts of a dump."""
    from megatron_flex.dump.part_format import read_part

    out = []
    for file in sorted(path.rglob("*.safetensors")):
        part = read_part(file)
        for entry in part.index.entries:
            size = part.where[entry.tensor][3] if entry.tensor in part.where else 0
            layout = dict(part.index.layouts[entry.layout])
            out.append(Written(part.index.rank, part.index.coords, entry, layout, size))
    return out


def summands(dump: Any, name: str) -> int:
    """How many ranks hold a summand of each entry of an array."""
    place = next(p for p in dump.manifest.sites if p.name == name.removesuffix(".grad"))
    layout = layout_from_json(dict(place.layout))
    layout = layout.gradient() if name.endswith(".grad") else layout
    out = 1
    for axis in layout.partial:
        out *= dump.manifest.sizes[axis]
    for cut in (c for d in layout.dims for c in d.cuts if c.partial):
        out *= cut.copies
    return out
