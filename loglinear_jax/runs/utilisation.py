"""Model FLOP utilisation: the matrix products that a training step needs, against what its devices can do at most.

Chowdhery et al., "PaLM", 2022, appendix B, without the attention, whose share depends on the mixer.
"""

from __future__ import annotations

from typing import Any

import jax

# FLOP/s of dense bfloat16 matrix products, as the makers' data sheets say; by how JAX calls the device, the first that fits.
PEAKS = {
    "NVIDIA B200": 2250e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA A100": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "TPU v6 lite": 918e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v4": 275e12,
}


def matmul_flops_per_token(params: Any) -> float:
    """FLOP of a training step: 6 for each weight of a matrix product. Embeddings are looked up; attention is not counted."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    matrices = [x.size for path, x in leaves if x.ndim == 2 and "embed" not in str(path) and "conv" not in str(path)]
    return 6.0 * sum(matrices)


def peak_flops(device_kind: str) -> float | None:
    """FLOP/s of dense bfloat16 matrix products of a device that JAX calls so; None if it is not in PEAKS."""
    return next((peak for name, peak in PEAKS.items() if device_kind.startswith(name)), None)


def utilisation(params: Any, tokens_per_second: float, devices: int) -> float | None:
    """The share of the devices' peak that training at this rate uses; None for devices whose peak is not known.

    params: of one seed, arrays or their shapes. tokens_per_second: of all seeds and devices.
    """
    peak = peak_flops(jax.devices()[0].device_kind)
    return None if peak is None else tokens_per_second * matmul_flops_per_token(params) / (peak * devices)
