"""State shared by editing functions: `save_ctx`, its scopes, and the transfer of values and gradients between
stages.
"""
