"""The one kind of error that a person sees, in one line."""


class PatchError(ValueError):
    """A file that cannot be patched, or brought back: which, why, and what to do."""
