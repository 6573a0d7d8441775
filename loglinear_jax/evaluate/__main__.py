"""python -m loglinear_jax.evaluate: the command `loglinear_jax evaluate`."""

import sys

from loglinear_jax.commands.main import main

if __name__ == "__main__":
    sys.exit(main(command="evaluate", called="python -m loglinear_jax.evaluate"))
