"""Any task by its module, with the task's own defaults: for a task of your own.

    python run.py --config=configs/task.py:my_package.my_task --config.task.seq_len=64

The argument is the name of a file in loglinear_jax/tasks/, or of any importable module, that names its Task subclass TASK;
then presets, joined by commas: released, robust, smoke (small enough for a CPU), as in configs/mqar.py.
"""

from loglinear_jax.config import (
    ConfigError,
    apply_presets,
    default_config,
    released_config,
    robust_config,
    smoke_config,
)


def get_config(argument=None):
    name, _, presets = (argument or "").partition(",")
    if not name:
        raise ConfigError("name the task's module: --config=task:my_package.my_task")
    return apply_presets(default_config(task=name), presets, PRESETS)


PRESETS = {"smoke": smoke_config, "released": released_config, "robust": robust_config}
