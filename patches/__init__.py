"""Source codemods: hook points and flags in somebody's own Megatron or fairscale, and out again.

They need LibCST and neither torch nor what they patch. `scripts/patch_upstream` is the door.
"""

VERSION = 1  # of what is written; a file with an older one gets this in its place
