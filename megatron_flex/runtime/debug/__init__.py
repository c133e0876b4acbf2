"""What helps to write an edit: a look at functions before they run, trials, traces, a debugger."""
