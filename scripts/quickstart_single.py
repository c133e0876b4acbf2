"""The same weights and the same batch in one process: Megatron's model, read and edited by PyTorch's hooks.

Nothing here goes through megatron_flex, but for the stand-ins that Megatron needs on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_flex import cpu

cpu.enable()

import torch  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.training import get_args  # noqa: E402
from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args  # noqa: E402
from megatron.training.arguments import parse_and_validate_args  # noqa: E402
from megatron.training.initialize import initialize_megatron  # noqa: E402
from quickstart_data import EDITS, add_folder, held_out_batch, load, save  # noqa: E402
from torch import Tensor, nn  # noqa: E402

Visit = Callable[[nn.Module, Tensor], Tensor]


def visit_output(module: nn.Module, visit: Visit) -> Any:
    """A plain forward hook that passes on what `visit` makes of a module's output."""

    def hook(module: nn.Module, _: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return visit(module, output[0]), *output[1:]
        return visit(module, output)

    return module.register_forward_hook(hook)


def build(args: Any, weights: dict[str, Tensor]) -> nn.Module:
    """The whole model with those weights."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    initialize_megatron()
    config = (hybrid_config_from_args if args.hybrid_layer_pattern else gpt_config_from_args)(args)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = config.get_builder_cls()(config).build_model(groups)
    own = dict(model.named_parameters())
    if own.keys() != weights.keys():
        raise RuntimeError(f"only one model has {sorted(own.keys() ^ weights.keys())}")
    for name, parameter in own.items():
        parameter.data.copy_(weights[name])
    return model.eval()


@torch.no_grad()
def loss_of(model: nn.Module) -> Tensor:
    """The mean loss of the held-out batch."""
    args = get_args()
    batch = held_out_batch(args.micro_batch_size, args.seq_length)
    return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]).mean()


def experiment(model: nn.Module, sites: list[str]) -> dict[str, Tensor]:
    """The activation at each site, and the losses, unedited and edited."""
    read: dict[str, Tensor] = {}
    handles = []
    for site in sites:
        path = site.partition(":")[0]
        module = model if path == "loss" else model.get_submodule(path)

        def keep(_: nn.Module, output: Tensor, site: str = site) -> Tensor:
            read[site] = output.detach().clone()
            return output

        handles.append(visit_output(module, keep))
    losses = {"unedited": loss_of(model)}
    for handle in handles:
        handle.remove()
    hybrid = get_args().hybrid_layer_pattern is not None
    for label, (of_gpt, of_hybrid, edit) in EDITS.items():
        name = of_hybrid if hybrid else of_gpt
        handle = visit_output(model.get_submodule(name), lambda m, t, edit=edit: edit(m, t, None, None))
        losses[label] = loss_of(model)
        handle.remove()
    return read | losses


def main() -> None:
    """Read the weights, and write what one process has at the places that the other run read."""
    args = parse_and_validate_args(add_folder)
    model = build(args, load(args.folder / "weights"))
    sites = [name for name, tensor in load(args.folder / "parallel").items() if tensor.ndim]
    save(args.folder / "single", experiment(model, sites))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
