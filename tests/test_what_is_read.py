"""What comes from outside is data: no file that is read is unpickled, evaluated or unpacked."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Modules and calls that make objects, run code or write files out of what they read.
MODULES = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "yaml", "tarfile"}
CALLS = {"eval", "exec", "extract", "extractall", "unpack_archive", "system", "popen"}
ALLOWED = {("config/files.py", "exec")}  # the config file that the user names: it is a program


def sources():
    folders = ("loglinear_jax", "pallas_kernels")
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def used(tree):
    """Names of modules that are imported, of what is called, and "allow_pickle" where it is given and not False."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]
        elif isinstance(node, ast.Call):
            yield getattr(node.func, "id", getattr(node.func, "attr", ""))
            for keyword in node.keywords:
                given = getattr(keyword.value, "value", None)
                if (keyword.arg == "allow_pickle" and given is not False) or (keyword.arg == "shell" and given):
                    yield keyword.arg


def test_nothing_in_the_package_unpickles_evaluates_or_unpacks():
    found = {
        (path.relative_to(ROOT).as_posix().removeprefix("loglinear_jax/"), name)
        for path in sources()
        for name in used(ast.parse(path.read_text(encoding="utf-8")))
        if name in MODULES | CALLS | {"allow_pickle", "shell"}
    }
    assert found == ALLOWED
