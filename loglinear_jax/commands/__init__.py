"""The command line: one file a command; `main` finds and runs them."""
