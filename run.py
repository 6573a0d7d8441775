"""Trains what a config says: python run.py --config=configs/selective_copy.py:smoke"""

import sys

from loglinear_jax.commands.main import main

if __name__ == "__main__":
    sys.exit(main(command="train", called="python run.py"))
