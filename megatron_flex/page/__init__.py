"""Page: one HTML file without server or network: the model, the mesh, what dumps and statistics hold."""

from megatron_flex.page.html_page import Page, html, write
from megatron_flex.page.rank_grid import RankGrid, grid_of_mesh, grid_of_ranks, grid_of_sizes

__all__ = ["Page", "RankGrid", "grid_of_mesh", "grid_of_ranks", "grid_of_sizes", "html", "write"]
