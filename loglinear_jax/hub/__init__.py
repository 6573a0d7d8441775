"""External checkpoints: loading and saving models of flash-linear-attention and of Guo et al."""

from loglinear_jax.hub.folders import load_model, save_model
from loglinear_jax.hub.layouts import LAYOUTS, export_params, import_params

__all__ = ["LAYOUTS", "export_params", "import_params", "load_model", "save_model"]
