"""python -m loglinear_jax.benchmark: the command `loglinear_jax benchmark attention`."""

import sys

from loglinear_jax.commands.main import main

if __name__ == "__main__":
    sys.exit(main(["attention", *sys.argv[1:]], command="benchmark", called="python -m loglinear_jax benchmark"))
