"""What the dims of a site are on one process, by its name: written down here and not asked of the library."""

from __future__ import annotations

ATTENTION = ("q", "k", "v")


def form_of(site: str, kind: str) -> str:
    """The dims of a site's tensor, a letter each (n: heads; d, h: features); empty where none is assumed.

    Args:
        site: its name.
        kind: of the model, as in `random_cases`.
    """
    path, _, point = site.partition(":")
    role = path.rpartition(".")[2]
    if path == "loss":
        return "bs"
    if point in ("scores", "probs") and role == "core_attention":
        return "bnss"
    if kind == "hybrid" or ".experts" in path or role in ("word_embeddings", "pooler", "binary_head"):
        return ""
    if role in ("self_attention", "linear_qkv", "core_attention") and point in ATTENTION:
        return "sbnd"
    if role in ("q_layernorm", "k_layernorm"):
        return "sbh" if kind == "latent" else "sbnd"
    return "" if point in ("map", "indices") else "sbh"
