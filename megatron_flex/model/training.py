"""Trainable modules inside hooks, and a frozen model around them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from megatron_flex.runtime import Session


class TrainableModuleRegistration:
    """What FlexModel does with trainable modules.

    Attributes:
        trainable_modules: by name, this rank's replicas. Their `state_dict()` is the same on every rank; load
            one on every rank alike, which `verify()` checks. FlexModel's own has it too, as
            `trainable_modules.lens.weight`.
    """

    session: Session
    trainable_modules: nn.ModuleDict

    def register_trainable_module(self, name: str, module: nn.Module) -> None:
        """Give editing functions a module to train: `modules[name]`. Every rank calls it alike.

        Each rank has a replica, on the model's device, and all of them start with the first rank's
        parameters and buffers. After each run of the schedule every replica has the same gradients, bit for
        bit: those of the mean, over microbatches and data parallel ranks, of a microbatch's own loss. So any
        optimizer of torch's does the same on every rank.

        Args:
            name: as for a key of nn.ModuleDict.
            module: parameters of real numbers.

        Raises:
            HookError: the name is taken or none, it is no module; on all ranks, if names, shapes or dtypes
                differ between ranks.
        """
        self.session.register_trainable(name, module)

    def trainable_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the trainable modules, for an optimizer."""
        return self.trainable_modules.parameters()

    def freeze(self) -> None:
        """Let no parameter of the wrapped model get a gradient. Every rank calls it.

        `unfreeze()` and `restore()` put back what was. Do not step the model's own optimizer meanwhile: its
        weight decay would move parameters without a gradient.

        Raises:
            FlexError: the framework's wrapper waits for gradients that would never come.
        """
        self.session.trainable.freeze()

    def unfreeze(self) -> None:
        """Put `requires_grad` back to what it was before `freeze()`. Every rank calls it."""
        self.session.trainable.unfreeze()
