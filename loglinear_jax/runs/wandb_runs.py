"""Weights & Biases: each variant is shown as a run of its own, by W&B's own library.

The library's environment variables say where to: WANDB_MODE=offline writes to the variant's folder alone.
"""

from __future__ import annotations

from typing import Any

from loglinear_jax.command_line import needs_extra
from loglinear_jax.runs.errors import RunFailed
from loglinear_jax.runs.folders import VariantFolder
from loglinear_jax.runs.writing import replace_file


def check_wandb() -> None:
    """Raises ModuleNotFoundError, with what to install, if the library is missing."""
    with needs_extra("wandb"):
        import wandb  # noqa: F401


def open_run(project: str, folder: VariantFolder, config: dict[str, Any]) -> Any:
    """The wandb.Run of a variant: a new one, or that which an earlier process of it has begun.

    Raises RunFailed if W&B refuses.
    """
    import wandb

    known = folder.wandb_file.read_text(encoding="utf-8").strip() if folder.wandb_file.exists() else None
    group, variant = folder.path.parts[-2:]
    try:
        run = wandb.init(
            project=project,
            id=known,
            resume="allow",
            group=group,
            name=f"{group}/{variant}",
            config=config,
            dir=str(folder.path),
            reinit="create_new",  # the variants of one program are shown at the same time
        )
    except wandb.errors.Error as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RunFailed(f"--wandb={project}: {reason}") from error
    replace_file(folder.wandb_file, lambda file: file.write(run.id + "\n"))
    return run
