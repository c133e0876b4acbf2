"""How far something long has come, for people at a terminal; quiet everywhere else."""
