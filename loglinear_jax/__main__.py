"""python -m loglinear_jax: the same as the command loglinear_jax."""

import sys

from loglinear_jax.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
