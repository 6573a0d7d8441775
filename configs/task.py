"""Any task by its module, with the task's own defaults: for a task of your own.

    python run.py --config=configs/task.py:my_package.my_task --config.task.seq_len=64

The argument is the name of a file in loglinear_jax/tasks/, or of any importable module, that names its Task subclass TASK;
then presets, joined by commas: released, robust, smoke (small enough for a CPU), as in configs/mqar.py.
"""

import dataclasses

from loglinear_jax.config import (
    ConfigError,
    apply_presets,
    default_config,
    released_config,
    robust_config,
    smoke_config,
)
from loglinear_jax.tasks import find_task


def get_config(argument=None):
    name, _, presets = (argument or "").partition(",")
    if not name:
        raise ConfigError("name the task's module: --config=configs/task.py:my_package.my_task")
    config = default_config()
    config.task.name = name
    for field in dataclasses.fields(find_task(name)):
        if field.default is dataclasses.MISSING:
            raise ConfigError(f"task {name}: its field {field.name} has no default value")
        config.task[field.name] = field.default
    return apply_presets(config, presets, {"smoke": smoke_config, "released": released_config, "robust": robust_config})
