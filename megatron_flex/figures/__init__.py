"""Figures: the numbers behind pictures, from dumps, statistics, caches and comparisons; drawn elsewhere."""
