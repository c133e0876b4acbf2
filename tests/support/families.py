"""Models besides GPT for the tests: modules that hold a GPTModel, T5, vision towers, LLaVA and Mimo.

Each family says how a case's model is built and called, and writes down the names of its sites.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Visit = Callable[[Tensor], Tensor]
Names = list[str]
VALUE, REWARD, T5, CLIP, RADIO = "value head", "reward head", "T5", "CLIP", "RADIO"
LLAVA, MIMO = "LLaVA", "Mimo"
IMAGE_TOKEN = 63  # of Mimo; LLaVA's is negative
TITLES = {  # of the sections of the coverage table
    VALUE: "A module that holds a GPTModel and a value head",
    REWARD: "GPTModel with a reward head",
    T5: "T5",
    CLIP: "CLIP's vision tower",
    RADIO: "RADIO's vision tower",
    LLAVA: "LLaVA",
    MIMO: "Mimo",
}
NEED = "value heads, T5, LLaVA and Mimo are built by the constructors of megatron-core 0.19"
PIXELS, PATCH = 8, 4
SIZE = {"patch_dim": PATCH, "img_h": PIXELS, "img_w": PIXELS}
PATCHES = (PIXELS // PATCH) ** 2
TEXT = 16  # the length of a microbatch's sequences
LLAVA_SEQUENCE = TEXT - 1 + PATCHES  # a token stands for the patches of an image


@dataclass(frozen=True)
class Parts:
    """The names of sites inside a layer, as `oracle.sites_of` writes them down for GPT.

    Attributes:
        attention: of self-attention, with its norm.
        mlp: of the MLP, with its norm.
    """

    attention: Names
    mlp: Names

    def stack(self, path: str, layers: int, more: Names = (), ends: bool = True) -> Names:  # type: ignore[assignment]
        """Of a stack of layers: `more` in each layer; with a norm and an output where it `ends`."""
        out: Names = []
        for layer in range(layers):
            at = f"{path}.layers.{layer}"
            out += [f"{at}:{p}" for p in ("input", "mid", "output")]
            out += [f"{at}{name}" if name[0] == ":" else f"{at}.{name}" for name in more]
            out += [f"{at}.{name}" for name in (*self.attention, *self.mlp)]
        return [*out, f"{path}.final_layernorm:input", f"{path}.final_layernorm:output"] if ends else out


# -- modules that hold a GPTModel ----------------------------------------------------------------------


def critic(gpt_model: Any, config: Any, last: bool) -> nn.Module:
    """A value model as frameworks of reinforcement learning wrap one: a policy's body with a head."""
    from megatron.core.enums import ModelType
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # What Megatron's schedules ask a model for.
            self.config, self.model_type = config, ModelType.encoder_or_decoder
            self.policy = gpt_model
            self.policy.post_process = False  # it gives the states that the logits would be computed from
            self.policy.output_layer = None
            if last:
                width = config.hidden_size
                self.v_head = nn.Sequential(nn.Linear(width, width // 2), nn.Tanh(), nn.Linear(width // 2, 1))
                for parameter in self.v_head.parameters():  # Megatron sums the gradients of what is marked
                    parameter.sequence_parallel = config.sequence_parallel

        def set_input_tensor(self, tensor: Any) -> None:
            self.policy.set_input_tensor(tensor)

        def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
            states = self.policy(tokens, positions, mask)
            if not last:
                return states
            values = self.v_head(states)
            if config.sequence_parallel:
                values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
            return values.squeeze(-1).t()

    return Critic()


def rewarder(gpt_model: Any, config: Any) -> nn.Module:
    """A GPTModel whose output layer gives a reward for each token instead of logits."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    class RewardLayer(nn.Linear):
        """Called as Megatron calls its output layer."""

        def __init__(self) -> None:
            super().__init__(config.hidden_size, 1)
            for parameter in self.parameters():
                parameter.sequence_parallel = config.sequence_parallel

        def forward(self, input_: Tensor, weight: Any = None, runtime_gather_output: Any = None) -> Any:
            rewards = super().forward(input_)
            if config.sequence_parallel:
                rewards = gather_from_sequence_parallel_region(rewards, tensor_parallel_output_grad=False)
            return rewards, None

    gpt_model.output_layer = RewardLayer()
    return gpt_model


# -- models of Megatron --------------------------------------------------------------------------------


def t5(config: Any, common: dict[str, Any]) -> nn.Module:
    """A T5Model of Megatron's local classes."""
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    encoder, decoder = (
        TransformerBlockSubmodules([spec] * config.num_layers, layer_norm=WrappedTorchNorm)
        for spec in (t5_spec.encoder_model_with_local_spec(), t5_spec.decoder_model_with_local_spec())
    )
    rest = {k: v for k, v in common.items() if k not in ("config", "vp_stage")}
    return T5Model(config, config, encoder, decoder, **rest)


def tower(family: str, config: Any) -> nn.Module:
    """A vision tower of Megatron's local classes."""
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    spec = get_vit_layer_with_local_spec()
    if family == CLIP:
        from megatron.core.models.vision.clip_vit_model import CLIPViTModel

        return CLIPViTModel(config, spec, ln_pre_impl=WrappedTorchNorm, **SIZE)
    from megatron.core.models.vision.radio import RADIOViTModel

    more = {"max_img_h": 2 * PIXELS, "max_img_w": 2 * PIXELS, "embedder_bias": True, "class_token_len": 2}
    norms = {"ln_pre_impl": WrappedTorchNorm, "ln_post_impl": WrappedTorchNorm}
    # Training crops the positions at random; evaluation does not.
    return RADIOViTModel(
        config, spec, force_cpe_eval_mode=True, use_mask_token=False, **more, **norms, **SIZE
    )


def seeing(config: Any) -> Any:
    """The configuration of a tower, or of a projector, beside a language model of this configuration."""
    other = copy.copy(config)
    other.sequence_parallel, other.pipeline_model_parallel_size = False, 1
    other.gated_linear_unit, other.activation_func = False, torch.nn.functional.gelu
    other.num_query_groups, other.add_bias_linear = other.num_attention_heads, True
    other.normalization, other.vision_model_type = "LayerNorm", "clip"
    return other


def projection() -> Any:
    """The linears of a projector's MLP."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules

    return MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


def llava(common: dict[str, Any], spec: Any) -> nn.Module:
    """A LLaVAModel: a CLIP tower and a projector on the first stage, a GPTModel on all."""
    from megatron.core.enums import ModelType
    from megatron.core.models.multimodal.llava_model import LLaVAModel
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec

    config = common["config"]
    model = LLaVAModel(
        config,
        spec,
        common["vocab_size"],
        LLAVA_SEQUENCE,
        seeing(config),
        get_vit_layer_with_local_spec(),
        True,
        seeing(config),
        projection(),
        language_position_embedding_type="rope",
        pre_process=common["pre_process"],
        post_process=common["post_process"],
        add_encoder=common["pre_process"],
        img_h=PIXELS,
        img_w=PIXELS,
        patch_dim=PATCH,
    )
    model.model_type = ModelType.encoder_or_decoder  # as Megatron's get_model() does it
    return model


def mimo(common: dict[str, Any], spec: Any) -> nn.Module:
    """A MimoModel of a CLIP tower with a projector, and a GPTModel."""
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.models.mimo.config import MimoModelConfig
    from megatron.core.models.mimo.model import MimoModel
    from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel
    from megatron.core.models.vision.multimodal_projector import MultimodalProjector
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.parallel_state import get_tensor_model_parallel_group
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    other = seeing(common["config"])
    encoder = {
        "transformer_config": other,
        "transformer_layer_spec": get_vit_layer_with_local_spec(),
        "ln_pre_impl": WrappedTorchNorm,
        **SIZE,
    }
    wide = {
        "config": other,
        "submodules": projection(),
        "projector_type": "mlp",
        "input_size": other.hidden_size,
    }
    images = ModuleSpec(
        module=VisionModalitySubmodules,
        submodules={
            "encoders": {"clip": ModuleSpec(module=CLIPViTModel, params=encoder)},
            "input_projections": [ModuleSpec(module=MultimodalProjector, params=wide)],
        },
    )
    language = {
        "transformer_layer_spec": spec,
        "scatter_embedding_sequence_parallel": False,
        **common,
    }
    settings = MimoModelConfig(
        language_model_spec=ModuleSpec(module=GPTModel, params=language),
        modality_submodules_spec={"images": images},
        special_token_ids={"images": IMAGE_TOKEN},
    )
    model = MimoModel(settings, tp_group=get_tensor_model_parallel_group())
    model.model_type = ModelType.encoder_or_decoder  # as Megatron's get_model() does it
    return model


# -- what the tests ask --------------------------------------------------------------------------------


def model(case: Any, common: dict[str, Any], spec: Any) -> nn.Module:
    """The model of a case on this rank; `common` and `spec` are what a GPTModel is given."""
    config = common["config"]
    if case.family == T5:
        return t5(config, common)
    if case.family in (CLIP, RADIO):
        return tower(case.family, config)
    if case.family == LLAVA:
        return llava(common, spec)
    if case.family == MIMO:
        return mimo(common, spec)
    from megatron.core.models.gpt.gpt_model import GPTModel

    body = GPTModel(transformer_layer_spec=spec, **common)
    if case.family == VALUE:
        return critic(body, config, common["post_process"])
    return rewarder(body, config) if common["post_process"] else body


def images(tokens: Tensor) -> Tensor:
    """Images of a microbatch, `[b, 3, height, width]`, which depend on its tokens; they get gradients."""
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    return torch.randn(len(tokens), 3, PIXELS, PIXELS, generator=generator).requires_grad_()


def call(case: Any, model: nn.Module, batch: dict[str, Tensor], positions: Tensor, mask: Tensor) -> Tensor:
    """Something to sum for a microbatch's loss; what this stage hands on where it is not the last."""
    tokens, labels = batch["tokens"], batch["labels"]
    if case.family == T5:
        seen = torch.zeros(len(tokens), 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool)
        short = tokens[:, : tokens.shape[1] // 2]  # of the decoder, which has other lengths than the encoder
        causal = mask[:, :, : short.shape[1], : short.shape[1]].expand(len(tokens), 1, -1, -1)
        return model(
            tokens, short, seen, causal, seen[:, :, : short.shape[1]], lm_labels=labels[:, : short.shape[1]]
        )
    if case.family in (CLIP, RADIO):
        return model(images(tokens)).cos()
    if case.family == LLAVA:
        tokens = tokens.clone()
        tokens[:, 3] = model.image_token_index
        output, _ = model(images(tokens), tokens, positions, None, labels, torch.ones_like(labels))
        return output
    if case.family == MIMO:
        tokens = tokens.clamp(max=IMAGE_TOKEN - 1)
        tokens[:, 2 : 3 + PATCHES] = IMAGE_TOKEN  # of the class and of each patch
        seen = {"images": {"clip": {"x": images(tokens)}}}
        return model(tokens, positions, None, torch.ones_like(labels), labels, seen)[0]
    output = model(tokens, positions, mask)
    if output.dim() == 3 and output.shape[-1] != 1:
        return output  # what the next stage gets
    values = output.squeeze(-1)
    return (values - labels / 50) ** 2


def sites_of(case: Any, gpts: Names, parts: Parts) -> Names:
    """All sites of a case's model; `gpts` are those of a GPT of the same layers."""
    if case.family == VALUE:
        body = [f"policy.{s}" for s in gpts if not s.startswith(("output_layer", "loss"))]
        modules = ("v_head", "v_head.0", "v_head.1", "v_head.2")
        return [*body, *(f"{m}:{p}" for m in modules for p in ("input", "output"))]
    if case.family == REWARD:
        body = [s for s in gpts if not s.startswith(("output_layer", "loss"))]
        return [*body, "output_layer:input", "output_layer:output"]
    if case.family == T5:
        return _t5_sites(case, gpts, parts)
    if case.family in (LLAVA, MIMO):
        return _multimodal_sites(case, gpts, parts)
    out = parts.stack("decoder", case.layers, ends=False)
    out += ["decoder:output", "ln_pre:input", "ln_pre:output"]
    if case.family == CLIP:
        return [*out, "conv1:input", "conv1:output"]
    names = ("input", "gemm_input", "output")
    return [*out, "ln_post:input", "ln_post:output", *(f"embedder:{n}" for n in names)]


def _multimodal_sites(case: Any, gpts: Names, parts: Parts) -> Names:
    vision, projector = TOWERS[case.family]
    seen = Parts(parts.attention, [s for s in parts.mlp if not s.endswith((":gate", ":up"))])
    tower = [*seen.stack("decoder", case.layers, ends=False), "decoder:output"]
    tower += [f"{m}:{p}" for m in ("conv1", "ln_pre") for p in ("input", "output")]
    mlp = [s for s in seen.mlp if s.startswith("mlp")]
    return [
        *(f"{vision}.{s}" for s in tower),
        *(s.replace("mlp", f"{projector}.encoder", 1) for s in mlp),
        *(f"language_model.{s}" for s in gpts),
    ]


TOWERS = {
    LLAVA: ("vision_model", "vision_projection"),
    MIMO: ("modality_submodules.images.encoders.clip", "modality_submodules.images.input_projections.0"),
}


def kept(case: Any, places: Names) -> Names:
    """Layers or sites of a GPT's decoder as they are called in a case's model, in each of its stacks."""
    towers = {name: (f"{vision}.decoder", "language_model.decoder") for name, (vision, _) in TOWERS.items()}
    stacks = {VALUE: ("policy.decoder",), T5: ("encoder", "decoder")} | towers
    return [
        place.replace("decoder", stack, 1)
        for place in places
        for stack in stacks.get(case.family, ("decoder",))
    ]


def _t5_sites(case: Any, gpts: Names, parts: Parts) -> Names:
    cross = [
        *(f"cross_attention:{p}" for p in ("input", "context", "output", "q", "k", "v")),
        *(f"cross_attention.linear_q:{p}" for p in ("input", "gemm_input", "output")),
        *(f"cross_attention.linear_kv:{p}" for p in ("input", "gemm_input", "output", "k", "v")),
        *(f"cross_attention.core_attention:{p}" for p in ("q", "k", "v", "scores", "probs", "output")),
        *(f"cross_attention.linear_proj:{p}" for p in ("input", "partial", "output")),
        *(f"pre_cross_attn_layernorm:{p}" for p in ("input", "output")),
        ":cross_mid",
    ]
    out = [s for s in gpts if s.startswith("embedding")]
    out += [*parts.stack("encoder", case.layers), "encoder:output"]
    out += [*parts.stack("decoder", case.layers, cross), "decoder:output"]
    out += [f"lm_head:{p}" for p in ("input", "output")]
    return [*out, *(f"lm_head.output_layer:{p}" for p in ("input", "gemm_input", "output")), "loss:output"]


def install(module: Any, path: str, point: str, visit: Visit) -> bool:
    """Put `visit` at a site that GPT does not have; false for others.

    Args:
        module: the module of the site in a model of one process.
        path: its path.
        point: the point in it.
        visit: called with the tensor, returns what takes its place.
    """
    if point == "context":
        return _keyword(module, "key_value_states", visit)
    if point == "cross_mid":
        make = module.cross_attn_bda
        module.cross_attn_bda = lambda *args: lambda *a, **k: visit(make(*args)(*a, **k))
        return True
    if path.endswith("linear_kv") and point in ("k", "v"):
        size, at = module.config.kv_channels, int(point == "v")

        def part(_: nn.Module, __: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
            heads = list(output[0].unflatten(-1, (-1, 2, size)).unbind(-2))
            heads[at] = visit(heads[at])
            return torch.stack(heads, -2).flatten(-3), output[1]

        module.register_forward_hook(part)
        return True
    return False


def _keyword(module: nn.Module, name: str, visit: Visit) -> bool:
    def hook(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, name: visit(kwargs[name])}

    module.register_forward_pre_hook(hook, with_kwargs=True)
    return True
