"""Source codemods: add hook points and flags to a copy of Megatron or fairscale, and remove them.

They need LibCST and neither torch nor what they patch. `scripts/patch_upstream` is the door.
"""

VERSION = 2  # version of the patch; a file with an older one is updated
