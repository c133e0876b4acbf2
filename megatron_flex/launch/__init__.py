"""The doors for launchers: what a person asks before, or instead of, starting a run."""
