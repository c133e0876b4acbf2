"""What editing functions share: `save_ctx`, its scopes, and how values and gradients go between stages."""
