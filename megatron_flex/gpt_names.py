"""GPTModel's names on a HybridModel, which has each transformer layer as two: attention, then MLP or experts.

Layer `k` of a GPTModel is layers `2k` and `2k + 1` of its migration, and the layer in a module of multi-token
prediction is two layers. Both models have modules called `decoder.layers.1.mlp`, which are different ones; so
a GPTModel's name is written `gpt:decoder.layers.1.mlp`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from megatron_flex.errors import SiteError

NAMESPACE = "gpt:"  # in front of a GPTModel's name, where a model's own names are expected
TRANSFORMER, ATTENTION, MLP, OTHER = "T", "*", "-", "?"  # the kinds of layers in a pattern
DECODER = "decoder"
GPT_FINAL_NORM, HYBRID_FINAL_NORM = "decoder.final_layernorm", "decoder.final_norm"
FINAL_NORMS = (GPT_FINAL_NORM, HYBRID_FINAL_NORM)
PART_KINDS = {  # the modules directly in a layer, and what they make it
    "self_attention": ATTENTION,
    "input_layernorm": ATTENTION,
    "mlp": MLP,
    "pre_mlp_layernorm": MLP,
}
# Points of the residual stream, of an attention layer and of an MLP layer, and a GPTModel's names of them.
STREAM_POINTS = ({"input": "input", "output": "mid"}, {"output": "output"})
PREDICTION = r"mtp\.layers\.\d+\.mtp_model_layer"  # a GPTModel's layer, or a HybridModel's stack of layers
PART = r"(?:\.(\w+))?(?=[.:]|$)"
IN_LAYER = r"(?=[.:]|$)(?:\.(\w+)(?=[.:]|$))?(?::(\w+))?(.*)"
LAYER = re.compile(rf"{DECODER}\.layers\.(\d+){PART}")
PREDICTION_LAYER = re.compile(rf"{PREDICTION}\.layers\.(\d+){PART}")
NAME_IN_LAYER = re.compile(rf"({DECODER})\.layers\.(\d+){IN_LAYER}")
NAME_IN_PREDICTION_LAYER = re.compile(rf"({PREDICTION})\.layers\.(\d+){IN_LAYER}")
NAME_IN_PREDICTION = re.compile(rf"({PREDICTION}){IN_LAYER}")
PREDICTION_MARK = "/"  # in a pattern, before the layers of prediction; Megatron's own patterns have it too
NO_STACK = "it has no decoder.layers"


def part_kind(part: str) -> str:
    """The kind of layer that a module directly in it shows: attention, MLP, or another one."""
    return PART_KINDS.get(part, OTHER)


def layer_pattern(names: Iterable[str]) -> str:
    """The kinds of a decoder's layers, a character each, from the names of its sites or parameters.

    `T` is a layer with attention and MLP, as a GPTModel has them, `*` attention, `-` MLP or experts, `?`
    another one, or one of which the names do not tell. Empty if no name is in a decoder's layer. After `/`
    are the layers of one module of multi-token prediction, if that has several layers.

    Examples:
        >>> from megatron_flex.gpt_names import layer_pattern
        >>> layer_pattern(["decoder.layers.0.self_attention:output", "decoder.layers.1.mlp:output"])
        '*-'
    """
    names = list(names)
    prediction = _kinds_of_layers(filter(None, map(PREDICTION_LAYER.match, names)))
    mark = PREDICTION_MARK if prediction else ""
    return _kinds_of_layers(filter(None, map(LAYER.match, names))) + mark + prediction


def _kinds_of_layers(matches: Iterable[re.Match[str]]) -> str:
    kinds: dict[int, set[str]] = {}
    for matched in matches:
        kinds.setdefault(int(matched[1]), set()).update([part_kind(matched[2])] if matched[2] else [])
    return "".join(_kind_of_layer(kinds.get(n, set())) for n in range(max(kinds, default=-1) + 1))


def _kind_of_layer(parts: set[str]) -> str:
    if {ATTENTION, MLP} <= parts:
        return TRANSFORMER
    return parts.pop() if len(parts) == 1 else OTHER


class GptNames:
    """The correspondence of a model's names and those of a GPTModel with the same weights.

    Args:
        pattern: the kinds of the model's layers, as `layer_pattern` returns them.

    Attributes:
        pattern: likewise.
        same: whether the model's names are a GPTModel's already.
        why: why there is no correspondence; empty if there is one.
        renames: whether there is a correspondence, by which names change.

    Examples:
        >>> from megatron_flex.gpt_names import GptNames
        >>> names = GptNames("*-*-/*-")
        >>> names.to_model("decoder.layers.1:mid"), names.to_gpt("decoder.layers.3.mlp:output")
        ('decoder.layers.2:output', 'decoder.layers.1.mlp:output')
        >>> names.to_model("mtp.layers.0.mtp_model_layer.mlp:output")
        'mtp.layers.0.mtp_model_layer.layers.1.mlp:output'
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        layers, _, self._prediction = pattern.partition(PREDICTION_MARK)
        self.same = TRANSFORMER in layers
        self.why = "" if self.same else _why_not_pairs(layers)
        self.renames = not self.same and not self.why

    def to_gpt(self, name: str) -> str | None:
        """A GPTModel's name for a name of this model; None if a GPTModel has no such hook point.

        The input of an MLP layer has none: it is the output of the attention layer before it, which a
        GPTModel calls `mid`.

        Args:
            name: of a site or parameter, perhaps with `.grad`, `#1` or `[1]` after it.

        Raises:
            SiteError: there is no correspondence.
        """
        self.check(name)
        if self.same:
            return name
        matched = NAME_IN_LAYER.fullmatch(name) or NAME_IN_PREDICTION_LAYER.fullmatch(name)
        if matched is None:
            return _replace_start(name, HYBRID_FINAL_NORM, GPT_FINAL_NORM)
        stack, number, part, point, rest = matched[1], int(matched[2]), matched[3], matched[4], matched[5]
        if stack == DECODER:
            layer = f"{DECODER}.layers.{number // 2}"
        elif self._why_no_prediction():
            return None
        else:
            layer = stack
        if part:
            return f"{layer}.{part}{':' + point if point else ''}{rest}"
        gpt_point = STREAM_POINTS[number % 2].get(point or "output")
        return None if gpt_point is None else f"{layer}:{gpt_point}{rest}"

    def index(self, names: Iterable[str]) -> dict[str, str]:
        """These names by a GPTModel's, without those of which it has none; unchanged without renaming."""
        if not self.renames:
            return {name: name for name in names}
        return {gpt_name: name for name in names if (gpt_name := self.to_gpt(name)) is not None}

    def to_model(self, name: str) -> str:
        """This model's name for a GPTModel's; a layer without a point is its output.

        Raises:
            SiteError: there is no correspondence.
        """
        self.check(name)
        if self.same:
            return name
        if matched := NAME_IN_LAYER.fullmatch(name):
            return _name_in_pair(f"{DECODER}.layers", 2 * int(matched[2]), matched[3], matched[4], matched[5])
        if self._prediction and (matched := NAME_IN_PREDICTION.fullmatch(name)):
            if why := self._why_no_prediction():
                raise _no_pairs(name, why)
            return _name_in_pair(f"{matched[1]}.layers", 0, matched[2], matched[3], matched[4])
        return _replace_start(name, GPT_FINAL_NORM, HYBRID_FINAL_NORM)

    def check(self, name: str) -> None:
        """Raise if the model's layers are not pairs of attention and MLP.

        Raises:
            SiteError: likewise; the message has `name`.
        """
        if self.why:
            raise _no_pairs(name, self.why)

    def _why_no_prediction(self) -> str:
        """Why the layers of prediction are not a pair; empty if they are."""
        expected = ATTENTION + MLP
        wrong = f"its layers of prediction would have to be {expected}, and are {self._prediction}"
        return "" if self._prediction == expected else wrong


def _name_in_pair(layers: str, first: int, part: str | None, point: str | None, rest: str) -> str:
    """The name of what a GPTModel's layer holds, in the two layers of a pair.

    Args:
        layers: the path of the list of layers.
        first: the number of the attention layer; the MLP's is the next.
        part: the module in the GPTModel's layer; None for the layer itself.
        point: of the hook point; None if the name has none.
        rest: what follows.
    """
    if part:
        of_mlp = part_kind(part) == MLP
        return f"{layers}.{first + of_mlp}.{part}{':' + point if point else ''}{rest}"
    for second, points in enumerate(STREAM_POINTS):
        for model_point, gpt_point in points.items():
            if gpt_point == (point or "output"):
                return f"{layers}.{first + second}{':' + model_point if point else ''}{rest}"
    return f"{layers}.{first + 1}:{point}{rest}"


def _no_pairs(name: str, why: str) -> SiteError:
    return SiteError(
        f"{NAMESPACE}{name.removeprefix(NAMESPACE)}: a GPTModel's layers are pairs of attention and "
        f"MLP, but this model's are not: {why}; use its own name, without {NAMESPACE!r}"
    )


def own_name(name: str, names: Iterable[str]) -> str:
    """A model's own name for a GPTModel's with the prefix `gpt:`; other names as they are.

    Args:
        name: of a site or parameter.
        names: those of all the model's sites, or of all its parameters.

    Raises:
        SiteError: the model has no layers as a GPTModel has them.
    """
    if not name.startswith(NAMESPACE):
        return name
    return GptNames(layer_pattern(names)).to_model(name.removeprefix(NAMESPACE))


def _why_not_pairs(pattern: str) -> str:
    """Why the layers are not pairs of attention and MLP; empty if they are."""
    if not pattern:
        return NO_STACK
    for number, kind in enumerate(pattern):
        if kind != (MLP if number % 2 else ATTENTION):
            expected = "MLP or experts" if number % 2 else "attention"
            return f"its layer {number} would have to be {expected}, in the pattern {pattern}"
    return "" if len(pattern) % 2 == 0 else f"its last layer has no MLP, in the pattern {pattern}"


def _replace_start(name: str, old: str, new: str) -> str:
    """The name with another path of the final norm."""
    rest = name.removeprefix(old)
    return new + rest if rest != name and rest[:1] in ("", ".", ":") else name
