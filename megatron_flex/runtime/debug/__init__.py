"""Tools for writing edits: source analysis, dry runs, traces, and a debugger."""
