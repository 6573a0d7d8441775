"""Annotations are enforced while tests run: shapes (jaxtyping) and types (beartype). Called before the package is imported."""

from pathlib import Path

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

ROOT = Path(__file__).parents[1]
# What computes with arrays. The rest of the package has few shapes in its annotations.
CHECKED = (
    "loglinear_jax/ops", "loglinear_jax/lam.py", "loglinear_jax/losses.py", "loglinear_jax/mixers.py", "loglinear_jax/modules",
    "loglinear_jax/models", "loglinear_jax/train", "pallas_kernels",
)  # fmt: skip
UNCHECKED = (
    # Public functions that check their arguments by themselves and name what is wrong with one: tests look for their errors, in
    # whose place the type checker's would come. What they call is checked.
    "loglinear_jax.ops.log_linear.api", "loglinear_jax.ops.gated_linear.api", "loglinear_jax.ops.softmax.api",
    # Flax's own annotation of a field that nn.Embed has, PromoteDtypeFn, cannot be checked.
    "loglinear_jax.modules.embedding",
)  # fmt: skip
# loglinear_jax.fenwick is not checked either: for the first reason, and because JAX builds a FenwickState of whatever a pytree
# may hold: shapes, shardings, None.

check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float


def enforce_annotations() -> None:
    files = (
        file for path in CHECKED for file in ((ROOT / path).rglob("*.py") if (ROOT / path).is_dir() else [ROOT / path])
    )
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files if file.stem != "__init__"}
    install_import_hook(sorted(modules - set(UNCHECKED)), "tests.type_checks.check")
