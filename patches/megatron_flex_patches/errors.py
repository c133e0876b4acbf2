"""The error of the patch command, in one line."""


class PatchError(ValueError):
    """A file that cannot be patched or restored: which, why, and what to do."""
