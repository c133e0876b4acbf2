"""Layouts of the tensors between parallel modules, followed from one to the next."""

from megatron_flex.adapters.following.follower import Follower

__all__ = ["Follower"]
