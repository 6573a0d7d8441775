"""python -m loglinear_jax.analysis: the command `loglinear_jax analyze`."""

import sys

from loglinear_jax.commands.main import main

if __name__ == "__main__":
    sys.exit(main(command="analyze", called="python -m loglinear_jax.analysis"))
