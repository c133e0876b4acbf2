"""Tools for dumps on disk: list the contents, summarize values, verify, remove what no reader uses."""
