"""Many runs from one file: a grid of cells, each a run with a workdir of its own, on this machine's GPUs or under SLURM."""
