"""What comes from outside is data: no file that is read is unpickled, evaluated or unpacked."""

import ast
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
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


def test_reading_a_run_unpickles_nothing_not_even_what_lies_in_its_checkpoints(workdir, tmp_path):
    """Python tells of every class that is looked up for a pickle."""
    run = tmp_path / "run"
    shutil.copytree(workdir, run)
    bomb = pickle.dumps(subprocess.CompletedProcess("x", 0))
    steps = sorted((run / "checkpoints" / "mlp_softplus").glob("[0-9]*"), key=lambda step: int(step.name))
    assert len(steps) > 1
    for step in steps:
        for place in (step, step / "default"):
            for name in ("extra", "extra.pkl", "aux"):
                (place / name).write_bytes(bomb)
    (steps[-1] / "default" / "checkpoint").write_bytes(bomb)  # the name of a format that Orbax once had: it is refused
    code = f"""
import sys
def hook(event, args):
    if event == "pickle.find_class":
        print("unpickled", args, flush=True)
sys.addaudithook(hook)
import pickle, subprocess
pickle.loads({bomb!r})
print("now the run", flush=True)
from loglinear_jax.analysis import load_run
from loglinear_jax.analysis.report import make_report
from loglinear_jax.analysis.section import Choices
for which in ("best", "last"):
    load_run({str(run)!r}, "mlp_softplus").params(0, which)
_, problems = make_report([{str(run)!r}], {str(tmp_path / "out")!r}, Choices(sections=("tables", "dependence"), sequences=2))
print("read", problems)
"""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.split("now the run\n")
    assert before.startswith("unpickled") and "unpickled" not in after
    assert after.startswith("read [") and after.count("parameters are those of step") == 1  # as the report tells
    assert f"{steps[-1].name} can't be read" in done.stderr
