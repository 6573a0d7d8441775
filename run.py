"""Trains what a config says: python run.py --config=configs/selective_copy.py:smoke"""

from loglinear_jax.commands.train import main

if __name__ == "__main__":
    main()
