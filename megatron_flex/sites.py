"""Sites: the named hook points of a model, and how names and patterns find them.

A name is `module.path:point`. It is global: layer 17 is layer 17 on every stage, chunk or wrapper.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from megatron_flex.document import Document, Note, Renderable, Row, Table
from megatron_flex.errors import SiteError, error_attributes, list_some, suggest_nearest
from megatron_flex.gpt_names import NAMESPACE, GptNames, layer_pattern
from megatron_flex.layout import Layout
from megatron_flex.layout.layout_drawing import format_shape
from megatron_flex.mesh import Mesh
from megatron_flex.wording import count_words

if TYPE_CHECKING:
    from megatron_flex.adapters import ParameterSite
    from megatron_flex.adapters.propagation.layout_propagation import PropagatedNames

GRADIENT_SUFFIX = ".grad"  # suffix of a gradient's name, after the name of its site
EDITED_SUFFIX = ".edited"  # suffix of the tensor after all edits at a site
HEAD_DIMS = (
    "n",
    "g",
    "heads",
)  # `g` counts heads of keys and values; `heads` is in older dumps
PACKED_HEAD_DIMS = ("n*d", "nd")  # heads side by side; `nd` is in dumps of earlier versions


Undo = Callable[[], None]


def ignore_absent(_: int) -> None:
    """The `absent` of `TapCallbacks` that report nothing."""


class TapCallbacks(NamedTuple):
    """What a tap calls. A tap that changes what hooks get passes on others, made by `_replace`.

    Attributes:
        run: runs the hooks on a local tensor, and returns the tensor to continue with, usually the same. Its
            arguments are the tensor, the layout of this call where it differs from the site's, and for rows
            of experts the `Route` to the tokens of the site's layout.
        absent: called with the number of tensors of a call that has none at the site.
        unknown: runs the hooks on a tensor whose layout could not be found out, with the reason; None: they
            do not get it.
    """

    run: Callable[..., Any]
    absent: Callable[[int], None] = ignore_absent
    unknown: Callable[[Any, str], Any] | None = None


@dataclass(eq=False, slots=True)  # not frozen, as a model may have a hundred thousand of them
class Tap:
    """Access to one tensor in a framework's forward path: a function, and what it is called with.

    Attributes:
        function: installs `TapCallbacks` and returns what removes them and restores every attribute; called
            with the module, the `TapCallbacks` and the arguments, and with `leaf=index` for another tensor of
            the same call.
        module: the module in whose call the tensor passes; None if there is none.
        arguments: the further arguments. Those of a function around another tap begin with that tap.
        index: the index of the tensor among those of the call, counted depth first; a negative index counts
            from the end.
        uses: finds what uses the tensor of an index that passes now. Its result is called when the forward
            pass is over; None where the uses do not decide the layout of the gradient.
    """

    function: Callable[..., Undo]
    module: Any
    arguments: tuple[Any, ...] = ()
    index: int = 0
    uses: Callable[[int], Any] | None = None

    def install(self, callbacks: TapCallbacks) -> Undo:
        """Install the callbacks; the returned function removes them and restores every attribute."""
        if self.index:
            return self.function(self.module, callbacks, *self.arguments, leaf=self.index)
        return self.function(self.module, callbacks, *self.arguments)

    def leaf(self, index: int) -> Tap:
        """The tap for another tensor of the same call."""
        return replace(self, index=index)

    def around(self, function: Callable[..., Undo], *arguments: Any) -> Tap:
        """A tap whose function gets this one as its first argument."""
        return Tap(function, self.module, (self, *arguments), 0, self.uses)


class DimNames(NamedTuple):
    """What is known of the dims of one tensor.

    Attributes:
        names: the names of its dims, empty where unknown.
        first: the position in the text of its first token: above 0 in a call that continues a text whose
            earlier tokens are in a cache, -1 if the cache does not tell how many.
        heads: the number of heads in a dim that has them side by side; 0 if unknown.
    """

    names: tuple[str, ...]
    first: int = 0
    heads: int = 0


@dataclass(frozen=True)  # without slots, for the `SiteForm` of experts
class Site:
    """A hook point: a named tensor of the forward pass.

    Attributes:
        name: global name, `decoder.layers.17.mlp.linear_fc1:output`.
        layout: the relation of the local tensor to the full tensor.
        shape: the shape of the full tensor; a name (`s`, `b`) where it depends on the data.
        stage: the pipeline stage that owns it.
        chunk: the virtual chunk of that stage.
        hidden: why no hook can be registered here, and which setting would change that; empty if one can.
        read_only_reason: why a hook here can only read, and where to edit instead; empty if it can edit.
        tap: access to the tensor; None on ranks that do not own it.
        inferred: whether the layout is not declared: the tensor is treated as replicated, unless a hook's
            `expected_shape` says which dim is sharded. `layout` and `shape` are empty then.
        propagated: whether the layout is propagated to each tensor at run time, and may turn out unknown.
        further_layouts: the known layouts of further tensors of the same output.
        index: which tensor of a nested output this is, counted depth first.
        unbatched: whether the tensor has no batch dim `b` when sequences are packed.
        order: its place in the order of the model, the same on all stages; None where its name tells that.
        aliases: the other names of a module that the model holds several times. A hook by any of them has all
            calls of the module, under `name`.
        names_dims: whether the names of its dims are found when the model is called, from its inputs.
        dim_names: their source, on the rank that owns the site.
        known: what is known of the dims in the current call, where a source has told it.

    Examples:
        >>> (site,) = flex.sites("decoder.layers.1.mlp.linear_fc1:output")
        >>> site.name, site.shape, site.stage
        ('decoder.layers.1.mlp.linear_fc1:output', ('s', 'b', 96), 0)
        >>> site.layout.describe()
        '[s/cp zigzag, b, gate|up/tp in 2 segments]'
    """

    name: str
    layout: Layout
    shape: tuple[int | str, ...]
    stage: int = 0
    hidden: str = ""
    read_only_reason: str = ""
    tap: Tap | None = field(default=None, compare=False, repr=False)
    inferred: bool = False
    propagated: bool = False
    further_layouts: tuple[Layout, ...] = ()
    index: int = 0
    chunk: int = 0
    unbatched: bool = False
    order: tuple[int, int] | None = None
    aliases: tuple[str, ...] = ()
    names_dims: bool = False
    dim_names: PropagatedNames | None = field(default=None, compare=False, repr=False)
    known: DimNames | None = None

    def __repr__(self) -> str:
        layout = "layout not declared" if self.inferred else self.layout.describe()
        shape = f" ({', '.join(map(str, self.shape))})" if self.shape else ""
        return f"<Site {self.name}{shape}: {layout}, stage {self.stage}>"

    @property
    def module(self) -> str:
        """The module path of the name."""
        return self.name.partition(":")[0]

    @property
    def point(self) -> str:
        """The point within the module: `output`, `input`, `partial`, `mid`, ..."""
        return self.name.partition(":")[2]

    @property
    def dims(self) -> tuple[str, ...]:
        """The names of the full tensor's dims: `s`, `b`, `h`, ..."""
        if self.known is not None:
            return self.known.names
        names = [d.name for d in self.layout.dims]
        return tuple(names if self.layout.permute is None else (names[i] for i in self.layout.permute))

    @property
    def place(self) -> str:
        """The name without the index of a tensor."""
        return self.name.removesuffix(f"[{self.index}]")

    def leaf(self, index: int) -> Site:
        """Another tensor of the same output; its name ends in `[index]`.

        Returns:
            The site of that tensor.

        Raises:
            SiteError: its layout is not known.

        Examples:
            >>> (site,) = flex.sites("decoder.layers.1:output")
            >>> site.leaf(0) == site
            True
        """
        if index == 0:
            return self
        if not self.inferred and not 0 < index <= len(self.further_layouts):
            raise SiteError(
                f"unpack_idx={index}: the layout of that tensor of {self.name} is not known; known are "
                f"{', '.join(map(str, range(len(self.further_layouts) + 1)))}",
                site=self.name,
            )
        layout = self.layout if self.inferred else self.further_layouts[index - 1]
        tap = None if self.tap is None else self.tap.leaf(index)
        name = f"{self.name}[{index}]"
        names = None if self.dim_names is None else self.dim_names.leaf(index)
        return replace(self, name=name, layout=layout, shape=(), tap=tap, index=index, dim_names=names)

    def remote(self) -> Site:
        """Return the site as known on ranks that do not own it.

        Examples:
            >>> (site,) = flex.sites("decoder.layers.1:output")
            >>> site.remote().tap is None
            True
        """
        return replace(self, tap=None, dim_names=None)


LAYER_NUMBER = re.compile(r"\.layers\.(\d+)[.:]")


def model_order(site: Site | ParameterSite) -> tuple[int, int]:
    """A sort key for sites of all stages and chunks: embeddings, layers by number, then the rest.

    Sites of plain modules are already in order within a chunk.
    """
    if site.order is not None:
        return site.order
    if site.inferred:
        return 0, site.chunk
    if site.name.startswith("mtp"):  # layers too, sorted after those of the decoder
        return 2, 0
    layer = LAYER_NUMBER.search(site.name)
    if layer:
        return 1, int(layer.group(1))
    return (0, 0) if site.name.startswith("embedding") else (2, 0)


Pattern = str | re.Pattern[str] | Callable[[Site], bool]  # selects sites


def describe_pattern(pattern: Pattern) -> str:
    """A pattern as a user writes it."""
    if isinstance(pattern, str):
        return pattern
    return (
        pattern.pattern if isinstance(pattern, re.Pattern) else getattr(pattern, "__qualname__", str(pattern))
    )


GLOB = re.compile(r"[*?\[]")  # what makes a name a pattern
GLOBS = {"**": ".*", "*": "[^.]*", "?": "[^.]"}


@cache
def _glob(pattern: str) -> re.Pattern[str]:
    tokens = re.findall(r"\*\*|\[!?[^\]]+\]|.", pattern)
    return re.compile("".join(_glob_token(t) for t in tokens))


def _glob_token(token: str) -> str:
    if token in GLOBS:
        return GLOBS[token]
    return token.replace("[!", "[^") if len(token) > 1 else re.escape(token)


def check_pattern(pattern: str) -> None:
    """Check that a text can be a name or a glob of sites or parameters; no model is needed.

    Raises:
        SiteError: it cannot match any name, whatever the model.
    """
    wrong = re.search(r"[^\w.:*?\[\]!#-]", pattern)
    if wrong is not None:
        raise SiteError(
            f"pattern {pattern!r} contains {wrong[0]!r}, which names do not contain; a name is module.path "
            "or module.path:point, and patterns add *, **, ? and [0-3]; pass several patterns separately",
            site=pattern,
        )
    if re.search(r"[\[\]]", re.sub(r"\[!?[^\[\]]+\]", "", pattern)):
        raise SiteError(f"pattern {pattern!r}: '[' and ']' do not match; write [0-3] or [14]", site=pattern)
    path, colon, point = pattern.removeprefix(NAMESPACE).partition(":")
    if "" in path.split(".") or (colon and not point) or ":" in point:
        raise SiteError(
            f"pattern {pattern!r} has an empty part; write a path such as 'decoder.layers.*', with at most "
            "one colon and a point after it",
            site=pattern,
        )


class SiteList(Renderable, list[Site]):
    """A list of sites; printed and in a notebook a table."""

    def to_document(self) -> Document:
        """Return the table, for `print` and notebooks."""
        return describe_sites(self)


class SiteTable(Renderable):
    """All sites of a model, over all stages, by name and in model order.

    Args:
        sites: the sites.
        layers: the kinds of the model's layers, as `layer_pattern` returns them, where `sites` are some of a
            model's only; empty if they are to be seen from the sites.
    """

    def __init__(self, sites: Iterable[Site] = (), layers: str = "") -> None:
        self._layers = layers
        self._sites: dict[str, Site] = {}
        for site in sites:
            if site.name in self._sites:
                raise SiteError(
                    f"site {site.name!r} was found twice; a name must identify one hook point", site=site.name
                )
            self._sites[site.name] = site

    def __iter__(self) -> Iterator[Site]:
        return iter(self._sites.values())

    def __len__(self) -> int:
        return len(self._sites)

    def __contains__(self, name: str) -> bool:
        return name in self._sites

    @cached_property
    def _of_module(self) -> dict[str, list[Site]]:
        """The sites of each module, by its path and by its other names."""
        out: dict[str, list[Site]] = {}
        for site in self._sites.values():
            for path in (site.module, *site.aliases):
                out.setdefault(path, []).append(site)
        return out

    @cached_property
    def gpt_names(self) -> GptNames:
        """The correspondence with the names of a GPTModel."""
        return GptNames(self._layers or layer_pattern(self._sites))

    def __getitem__(self, name: str) -> Site:
        if name not in self._sites:
            raise SiteError(f"no site {name!r}{suggest_nearest(name, self._sites)}", site=name)
        return self._sites[name]

    def to_document(self) -> Document:
        """Return a table of the sites, for `print` and notebooks."""
        return describe_sites(list(self), "SiteTable")

    def match(self, pattern: Pattern, point: str | None = None) -> SiteList:
        """Find sites.

        Args:
            pattern: a site's name, a module's name, or a glob over either. `*` and `?` match within one
                component of the path (`decoder.layers.*` are the layers, `decoder.layers.*.mlp.*` the modules
                in their MLPs), `**` matches across components, `[0-3]` matches one character. A compiled
                regular expression must match the full name of a module, or of a site if it has a colon; a
                function is called with every site and returns whether it matches, whatever `point` is.
                After `gpt:` a name or glob is over the names of a GPTModel with the same weights.
            point: the point to use where the pattern names none; None for every point.

        Returns:
            The sites in model order.

        Raises:
            SiteError: nothing matches; the message lists the nearest names. Or the model has no layers as a
                GPTModel has them, and a name of a GPTModel is asked for.
        """
        with error_attributes(site=describe_pattern(pattern)):
            return self._match(pattern, point)

    def _match(self, pattern: Pattern, point: str | None) -> SiteList:
        if not isinstance(pattern, str):
            return self._chosen(pattern, point)
        if self.has_gpt_prefix(pattern):
            return self._match_gpt(pattern, point)
        path, colon, named = pattern.partition(":")
        wanted_point = named if colon else point
        candidates = self if GLOB.search(path) else self._of_module.get(path, ())
        matched = [
            s
            for s in candidates
            if any(_glob(path).fullmatch(module) for module in (s.module, *s.aliases))
            and (wanted_point is None or _glob(wanted_point).fullmatch(s.point))
        ]
        if not matched:
            raise SiteError(self._nothing(pattern, path, wanted_point))
        return SiteList(matched)

    def has_gpt_prefix(self, pattern: str) -> bool:
        """Whether a name is a GPTModel's, and no point of a module that is called `gpt`."""
        return pattern.startswith(NAMESPACE) and NAMESPACE[:-1] not in self._of_module

    def own_name(self, name: str) -> str:
        """The model's own name for a GPTModel's with its prefix; other names as they are.

        Raises:
            SiteError: the model has no layers as a GPTModel has them.
        """
        if not self.has_gpt_prefix(name):
            return name
        return self.gpt_names.to_model(name.removeprefix(NAMESPACE))

    def _match_gpt(self, pattern: str, point: str | None) -> SiteList:
        self.gpt_names.check(pattern)
        table, by_gpt_name = self._by_gpt_name
        try:
            matched = table.match(pattern.removeprefix(NAMESPACE), point)
        except SiteError as error:
            raise SiteError(f"{pattern!r}: by a GPTModel's names, {error}") from None
        return SiteList(by_gpt_name[site.name] for site in matched)

    @cached_property
    def _by_gpt_name(self) -> tuple[SiteTable, dict[str, Site]]:
        """The sites that a GPTModel has too, under its names, and as they are."""
        by_gpt_name = {name: site for site in self if (name := self.gpt_names.to_gpt(site.name)) is not None}
        return SiteTable(replace(site, name=name) for name, site in by_gpt_name.items()), by_gpt_name

    def _chosen(self, pattern: re.Pattern[str] | Callable[[Site], bool], point: str | None) -> SiteList:
        if not isinstance(pattern, re.Pattern):
            chosen = [s for s in self if pattern(s)]
        elif ":" in pattern.pattern.replace("(?:", ""):
            chosen = [s for s in self if pattern.fullmatch(s.name)]
        else:
            chosen = [s for s in self if pattern.fullmatch(s.module) and point in (None, s.point)]
        if not chosen:
            raise SiteError(
                f"{describe_pattern(pattern)!r} matches none of {count_words(len(self), 'site')}; "
                "flex.sites() lists them"
            )
        return SiteList(chosen)

    def _nothing(self, pattern: str, path: str, point: str | None) -> str:
        check_pattern(pattern)
        modules = ((s, (s.module, *s.aliases)) for s in self)
        points = sorted({s.point for s, paths in modules if any(_glob(path).fullmatch(p) for p in paths)})
        if points:
            return f"{pattern!r} has no point {point!r}; it has {', '.join(points)}"
        names = [s.name for s in self] if ":" in pattern else list(dict.fromkeys(s.module for s in self))
        return f"pattern {pattern!r} matches no site{suggest_nearest(pattern, names)}"


def describe_sites(sites: Sequence[Site], title: str = "", mesh: Mesh | None = None) -> Document:
    """A table of sites: name, layout, full shape, stage, and why hooks cannot be there, or can only read.

    Args:
        sites: the sites.
        title: what they are.
        mesh: the ranks; with it layouts are without axes of one rank.
    """
    hidden = sum(bool(s.hidden) for s in sites)
    sizes = None if mesh is None else mesh.sizes
    words = {layout: layout.describe(sizes) for layout in {s.layout for s in sites}}  # few, of many sites
    rows = [
        Row(
            (
                s.name,
                "known when the model runs" if s.inferred else words[s.layout],
                format_shape(s.dims, s.shape) if s.dims else " x ".join(map(str, s.shape)),
                str(s.stage),
                f"no hook: {s.hidden}"
                if s.hidden
                else f"can be read only: {s.read_only_reason}"
                if s.read_only_reason
                else "",
            )
        )
        for s in sites
    ]
    rest = "name fewer (flex.sites('decoder.layers.0.**')), or fold layers by flex.report.show()"
    where = "" if mesh is None else f"{mesh.describe()}: "
    head = f"{where}{count_words(len(sites), 'site')}" + (f", {hidden} of them hidden" if hidden else "")
    return Document(
        title, [Note(head), Table(("site", "layout", "full shape", ">stage", ""), rows, rest=rest)]
    )


def strip_numbers(name: str) -> str:
    """A name without the numbers of layers and experts."""
    return re.sub(r"\.\d+(?=[.:]|$)", ".*", name)


def fold_numbers(names: Sequence[str]) -> str:
    """One text for names that differ in the numbers of layers and experts.

    Where they differ, it has `*` for all numbers from 0 on, otherwise the numbers: `{4-7}`, `{1,9}`.

    Examples:
        >>> from megatron_flex.sites import fold_numbers
        >>> fold_numbers(["decoder.layers.0:output", "decoder.layers.1:output"])
        'decoder.layers.*:output'
    """
    parts = [re.split(r"\.(\d+)(?=[.:]|$)", name) for name in names]
    out = parts[0][0]
    for at in range(1, len(parts[0]), 2):
        numbers = sorted({int(part[at]) for part in parts})
        out += f".{_describe_numbers(numbers)}{parts[0][at + 1]}"
    return out


def _describe_numbers(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if first == last:
        return str(first)
    if last - first != len(numbers) - 1:
        return f"{{{','.join(map(str, numbers))}}}"
    return f"{{{first}-{last}}}" if first else "*"


RECORDED_NAME = re.compile(r"(?P<base>.*?)(?P<gradient>\.grad)?(?P<call>#\d+)?")


class RecordedName:
    """A name of a dump or of statistics, split into its parts: `decoder.layers.0.mlp:output.grad#1`.

    Attributes:
        module: up to the colon; of a parameter the name.
        point: after the colon; empty for a module that has been named alone, and for a parameter.
        gradient: `.grad` or empty.
        call: `#1`, which call of the module in a microbatch, or empty.
    """

    def __init__(self, name: str) -> None:
        matched = cast(re.Match[str], RECORDED_NAME.fullmatch(name))
        base: str = matched["base"]
        self.module, _, self.point = base.partition(":")
        self.gradient, self.call = matched["gradient"] or "", matched["call"] or ""

    def is_like(self, query: RecordedName) -> bool:
        """Whether gradient, call and point are those that are wanted; none is wanted that is not named."""
        return (
            self.gradient == query.gradient
            and query.call in ("", self.call)
            and (not query.point or bool(_glob(query.point).fullmatch(self.point)))
        )


def find_recorded_names(text: str, names: Sequence[str], where: str, layers: str = "") -> list[str]:
    """The names of a dump or of statistics that a text means, in their order.

    Args:
        text: a name; a module's name, for its output or its only point; the end of a module's name from a dot
            on, if only one module ends so (`3.mlp`); or a glob, as for hooks. `.grad` at its end is the
            gradient, `#1` one of several calls. After `gpt:`, all this is over the names of a GPTModel.
        names: those that there are.
        where: the dump or the folder, for errors.
        layers: the kinds of the layers of the model; empty if they are to be seen from the names.

    Returns:
        Several names for a glob, and for a site that was called several times; else one, or none.

    Raises:
        SiteError: more than one module or point is meant; or a GPTModel's, and the model's layers are others.
    """
    if text in names:
        return [text]
    if text.startswith(NAMESPACE):
        gpt = GptNames(layers or layer_pattern(names))
        by_gpt_name = {gpt_name: name for name in names if (gpt_name := gpt.to_gpt(name)) is not None}
        return [
            by_gpt_name[n]
            for n in find_recorded_names(text.removeprefix(NAMESPACE), list(by_gpt_name), where)
        ]
    query = RecordedName(text)
    parsed = {name: RecordedName(name) for name in names}
    like = {name: recorded for name, recorded in parsed.items() if recorded.is_like(query)}
    if GLOB.search(text):
        path = _glob(query.module)
        matched = {name: recorded for name, recorded in like.items() if path.fullmatch(recorded.module)}
        outputs = [name for name, recorded in matched.items() if recorded.point in ("", "output")]
        if matched:
            return list(matched) if query.point or not outputs else outputs
    else:
        matched = {name: recorded for name, recorded in like.items() if recorded.module == query.module}
        if not matched:
            ending = f".{query.module}"
            matched = {name: recorded for name, recorded in like.items() if recorded.module.endswith(ending)}
        if matched:
            return _choose_point(text, matched, where)
    return []


def _choose_point(text: str, recorded: dict[str, RecordedName], where: str) -> list[str]:
    """The names of one point of one module: of its output if there are several."""
    if len({parsed.module for parsed in recorded.values()}) > 1:
        raise SiteError(
            f"{text!r} in {where} is the end of {list_some(list(recorded), 4)}; name one, or a pattern",
            site=text,
        )
    outputs = [name for name, parsed in recorded.items() if parsed.point in ("", "output")]
    if not outputs and len({parsed.point for parsed in recorded.values()}) > 1:
        raise SiteError(
            f"{text!r} in {where} has several points ({list_some(list(recorded), 4)}); name one of them",
            site=text,
        )
    return outputs or list(recorded)
