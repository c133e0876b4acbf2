"""Page: one HTML file without server or network: the model, the mesh, what dumps and statistics hold."""
