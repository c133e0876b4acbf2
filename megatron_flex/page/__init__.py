"""Page: one HTML file without server or network: the model, the mesh, what dumps and statistics hold."""

from megatron_flex.page.content import Page
from megatron_flex.page.grid import Grid, of_mesh, of_ranks, of_sizes
from megatron_flex.page.writing import html, write

__all__ = ["Grid", "Page", "html", "of_mesh", "of_ranks", "of_sizes", "write"]
