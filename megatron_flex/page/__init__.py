"""Page: one HTML file without server or network: the model, the mesh, what dumps and statistics hold."""

from megatron_flex.page.content import Page
from megatron_flex.page.rank_grid import RankGrid, grid_of_mesh, grid_of_ranks, grid_of_sizes
from megatron_flex.page.writing import html, write

__all__ = ["RankGrid", "Page", "html", "grid_of_mesh", "grid_of_ranks", "grid_of_sizes", "write"]
