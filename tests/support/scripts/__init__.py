"""Scripts that launches run; alone in their folder, which Python puts on the path."""
