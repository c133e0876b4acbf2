"""Plots: what figures tell, drawn by matplotlib."""
