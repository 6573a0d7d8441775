"""The command line: one file a command; `main` finds and runs them."""

# Exit codes, beside 0: done.
FAILED = 1  # something was left out, or the disk was full, or memory too little: one line on stderr says which
BAD_INPUT = 2  # one line on stderr says which
INTERRUPTED = 130  # what there was to save is saved
BROKEN_PIPE = 141  # the reader of the output is gone
