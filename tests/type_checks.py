"""Annotations of functions are enforced while tests run: shapes by jaxtyping, types by beartype."""

from pathlib import Path

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

ROOT = Path(__file__).parents[1]
# What computes with arrays. The rest of the package has few shapes in its annotations.
CHECKED = (
    "loglinear_jax/ops/**/*.py",
    "loglinear_jax/modules/*.py",
    "loglinear_jax/models/*.py",
    "loglinear_jax/train/*.py",
    "loglinear_jax/lam.py",
    "loglinear_jax/losses.py",
    "loglinear_jax/layers.py",
    "loglinear_jax/mixers/*.py",
    "pallas_kernels/**/*.py",
)
# What checks arguments by itself and names what is wrong with one: tests look for its errors, in whose place the type checker's
# would come. What it calls is checked. loglinear_jax/fenwick.py is not in the list above for the same reason.
UNCHECKED = (
    "loglinear_jax/ops/checks.py",
    "loglinear_jax/ops/dispatch.py",
    "loglinear_jax/ops/*/api.py",
    "pallas_kernels/pointwise/cross_entropy_kernel.py",  # Triton compiles it, and knows no checker's names
)
types = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float


def check(function):
    """Functions alone, and no dataclass's fields: JAX builds states of whatever a pytree may hold (shapes, shardings, None),
    and Flax annotates a field of its modules in a way that cannot be checked."""
    return function if function.__name__ == "__init__" else types(function)


def enforce_annotations() -> None:
    """Has effect on what is imported afterwards."""
    checked, unchecked = ({path for name in names for path in ROOT.glob(name)} for names in (CHECKED, UNCHECKED))
    paths = sorted(
        path for path in checked - unchecked if path.stem != "__init__"
    )  # a package would stand for all in it
    install_import_hook([".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths], f"{__name__}.check")
