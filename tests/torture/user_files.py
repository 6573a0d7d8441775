"""Mistakes in files of a user's own: a config, a task, a λ; and what is expected of each."""

from __future__ import annotations

import dataclasses
from pathlib import Path

CONFIG = "from loglinear_jax.config import default_config\n"
GOOD_CONFIG = CONFIG + "def get_config(preset=None):\n    return default_config(task='mqar')\n"
TASK = "import dataclasses, jax, jax.numpy as jnp, numpy as np\nfrom loglinear_jax.tasks import Task\n"
TASK += "from loglinear_jax.settings import SettingError\n"
DATACLASS = "@dataclasses.dataclass(frozen=True)\n"
SAMPLE = (
    "        tokens = jax.random.randint(key, (num, self.seq_len), 0, self.vocab_size)\n        return tokens, tokens\n"
)
LAM = "import flax.linen as nn\nimport jax.numpy as jnp\n"
OWN_LAM = LAM + "class Own(nn.Module):\n    def __call__(self, d):\n        return "


def config(body: str) -> str:
    return CONFIG + "def get_config(preset=None):\n    config = default_config(task='mqar')\n" + body


def task(
    sample: str = SAMPLE, head: str = "", fields: str = "", end: str = "TASK = Own\n", decorator: str = DATACLASS
) -> str:
    method = "    def sample(self, key, num):\n" + sample if sample else "    pass\n"
    return TASK + head + decorator + "class Own(Task):\n" + fields + method + end


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A file. kind: "config", "task" or "lam". expected: "line", "traceback" or "accepted". names: for a line, beside the
    file's own name, one of which is to be in it."""

    what: str
    kind: str
    source: str | bytes
    expected: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


CONFIGS = (
    ("nothing wrong", GOOD_CONFIG, "accepted"), ("empty", "", "line", "get_config"),
    ("syntax error", "def get_config(:\n", "line"), ("binary", b'\x00\xff\xfe\x80' * 9, "line"),
    ("Latin-1", "# café\n".encode("latin-1"), "line"), ("get_config is a number", "get_config = 3\n", "line", "get_config"),
    ("returns None", config("    pass\n"), "line", "get_config"),
    ("returns a dict", "def get_config(preset=None):\n    return {}\n", "line", "get_config"),
    ("returns an empty ConfigDict", "import ml_collections as m\nget_config = lambda p=None: m.ConfigDict()\n", "line"),
    ("KeyError in get_config", config("    return {}['x']\n"), "traceback"),
    ("AttributeError in get_config", config("    config.nope.x = 3\n    return config\n"), "traceback"),
    ("AttributeError of a module", config("    import os\n    return os.nope\n"), "traceback"),
    ("TypeError in get_config", config("    return len(3)\n"), "traceback"),
    ("ValueError in get_config", config("    raise ValueError('my own')\n"), "traceback"),
    ("ModuleNotFoundError", "import no_such_module_anywhere\n", "traceback"),
    ("ImportError", "from os import nope\n", "traceback"),
    ("OSError in get_config", config("    open('/no/such/file')\n"), "traceback"),
    ("ZeroDivisionError at import", "1 / 0\n", "traceback"),
    ("a setting of another type", config("    config.train.num_steps = 'x'\n    return config\n"), "traceback"),
    ("a setting that is none", config("    config.train.nope = 3\n    return config\n"), "line", "train.nope"),
    ("a section that is a number", config("    del config.train\n    config.train = 3\n    return config\n"), "line",
     "train"),
    ("a setting out of range", config("    config.train.num_steps = 0\n    return config\n"), "line", "num_steps"),
    ("needs presets", "def get_config(a, b):\n    return None\n", "line", "presets"),
)  # fmt: skip
TASKS = (
    ("nothing wrong", task(), "accepted"), ("empty", "", "line", "TASK"), ("no TASK", task(end=""), "line", "TASK"),
    ("TASK = 3", task(end="TASK = 3\n"), "line", "TASK"), ("an instance", task(end="TASK = Own()\n"), "line", "TASK"),
    ("no dataclass", task(fields="    delay: int = 1\n", decorator=""), "line", "TASK", "dataclass"),
    ("not a Task", TASK + DATACLASS + "class Own:\n    seq_len: int = 8\nTASK = Own\n", "line", "TASK"),
    ("a field without default", task(fields="    delay: int = dataclasses.field()\n"), "traceback"),
    ("syntax error", "def (:\n", "traceback"), ("fails at import", "raise RuntimeError('my own')\n", "traceback"),
    ("imports what is not there", "import no_such_module_anywhere\n", "traceback"),
    ("AttributeError at import", "import os\nos.nope\n", "traceback"), ("no sample", task(sample=""), "line", "sample"),
    ("sample returns lists", task("        return [[1] * self.seq_len] * num, [[1] * self.seq_len] * num\n"), "line",
     "sample"),
    ("sample returns None", task("        return None\n"), "line", "sample"),
    ("sample returns one array", task("        return jnp.zeros((num, self.seq_len), int)\n"), "line", "sample"),
    ("sample of a wrong shape", task("        x = jnp.zeros((num, 3), int)\n        return x, x\n"), "line", "sample"),
    ("sample of floats", task("        x = jnp.zeros((num, self.seq_len))\n        return x, x\n"), "line", "sample"),
    ("tokens too large", task(SAMPLE.replace("return tokens, ", "return tokens + 9999, ")), "line", "sample", "vocab_size"),
    ("nothing scored", task(SAMPLE.replace(", tokens\n", ", -jnp.ones_like(tokens)\n")), "line", "sample"),
    ("sample raises", task("        raise RuntimeError('my own')\n"), "traceback"),
    ("sample raises ValueError", task("        raise ValueError('my own')\n"), "traceback"),
    ("sample misspells", task("        return self.nope\n"), "traceback"),
    ("sample branches on tracers", task("        return 0 if jax.random.uniform(key) > 0 else 1\n"), "traceback"),
    ("check has a bug", task(fields="    def check(self):\n        self.nope\n"), "traceback"),
    ("check refuses", task(fields="    def check(self):\n        raise SettingError('task.delay: no')\n"), "line",
     "task.delay"),
)  # fmt: skip
LAMS = (
    ("nothing wrong", OWN_LAM + "jnp.ones(d.shape)\n", "accepted"), ("no such class", "", "line", "Own"),
    ("not a module", "Own = 3\n", "line", "Own"), ("fails at import", "1 / 0\n", "traceback"),
    ("call has a bug", OWN_LAM + "self.nope\n", "traceback"),
    ("a wrong shape", OWN_LAM + "jnp.ones(3)\n", "line", "lam", "λ"),
    ("returns None", OWN_LAM + "None\n", "line", "lam", "λ"),
    ("has no call", LAM + "class Own(nn.Module):\n    pass\n", "line", "lam", "__call__"),
)  # fmt: skip
MISTAKES = tuple(
    Mistake(what, kind, source, expected, tuple(names))
    for kind, table in (("config", CONFIGS), ("task", TASKS), ("lam", LAMS))
    for what, source, expected, *names in table
)


def write_mistake(mistake: Mistake, folder: Path) -> tuple[Path, list[str]]:
    """Writes the file; returns it and the command line that uses it."""
    path = folder / f"own_{mistake.kind}_{MISTAKES.index(mistake)}.py"
    source = mistake.source
    path.write_bytes(source if isinstance(source, bytes) else source.encode())
    if mistake.kind == "config":
        return path, [f"--config={path}"]
    if mistake.kind == "task":
        return path, [f"--config=task:{path.stem},smoke"]
    return path, ["--config=mqar:smoke", f"--config.variants={path.stem}:Own"]
