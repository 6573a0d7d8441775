"""The language model that a command is to use: of a run, or one that others trained."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from loglinear_jax.commands.arguments import path, whole_number

if TYPE_CHECKING:
    from loglinear_jax.models import LanguageModel


def add_trained_arguments(parser: argparse.ArgumentParser) -> None:
    """What `load_trained` reads."""
    trained = parser.add_mutually_exclusive_group(required=True)
    trained.add_argument("--workdir", type=path, help="a run")
    trained.add_argument(
        "--model",
        help="a model that others trained: a folder with config.json, safetensors and tokenizer, or its name on the hub",
    )
    parser.add_argument("--tokenizer", help="of --model: a folder, or a name on the hub, if it has none of its own")
    parser.add_argument("--variant", help="which variant of the run; needed if it has several")
    parser.add_argument("--model_seed", type=whole_number, help="which seed's parameters (default: the first)")


def load_trained(args: argparse.Namespace) -> tuple[LanguageModel, Any, Any]:
    """(the model, one seed's parameters, its tokenizer) by --workdir, --variant and --model_seed, or by --model.

    Raises SettingError or NoReadableCheckpoint where one is not there, or they do not fit together.
    """
    from loglinear_jax.config import ConfigError
    from loglinear_jax.hub.folders import find_folder, load_model
    from loglinear_jax.models import LanguageModel
    from loglinear_jax.runs.loading import load_run
    from loglinear_jax.settings import SettingError
    from loglinear_jax.text import load_tokenizer
    from loglinear_jax.text.tokenizer import tokenizer_size
    from pallas_kernels import runs_on_gpu

    if args.model is None:
        if args.tokenizer is not None:
            raise SettingError("--tokenizer is of a --model: a run has its own")
        run = load_run(args.workdir, args.variant)
        if not isinstance(run.model, LanguageModel):
            raise ConfigError(f"{run.workdir} holds no language model, but the task {run.config.task.name}")
        tokenizer = load_tokenizer(str(run.workdir))
        model_seed = run.seeds[0] if args.model_seed is None else args.model_seed
        if model_seed not in run.seeds:
            raise ConfigError(f"model_seed={model_seed} is not in this run, which has {run.seeds}")
        return run.model, run.params(model_seed), tokenizer
    for name in ("variant", "model_seed"):
        if getattr(args, name) is not None:
            raise SettingError(f"--{name} is of a run, and has no meaning with --model")
    try:
        folder = find_folder(args.model)
        settings, params = load_model(folder, dtype="bfloat16" if runs_on_gpu() else "float32")
    except ValueError as error:
        raise SettingError(f"--model: {error}") from error
    where = str(folder) if args.tokenizer is None else args.tokenizer
    tokenizer = load_tokenizer(where)
    if (ids := tokenizer_size(tokenizer)) > settings.vocab_size:
        raise SettingError(
            f"--tokenizer: that of {where} has ids up to {ids - 1:,}: expected at most {settings.vocab_size - 1:,}, as in the "
            "model"
        )
    return LanguageModel(settings), params, tokenizer
