"""A run's language model as a folder of config.json, safetensors and tokenizer, as flash-linear-attention lays it out.

loglinear_jax export --workdir=runs/wikitext2 --variant=linear --out=my-model
"""

from __future__ import annotations

import argparse
import sys

from loglinear_jax.command_line import BadInput, check_folder, path
from loglinear_jax.commands.logs import quiet_libraries
from loglinear_jax.commands.trained_models import add_run_arguments, trained_of_run

HELP = "a run's language model in the layout of flash-linear-attention"
EXTRA = "text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workdir", type=path, required=True, help="a run")
    add_run_arguments(parser)
    parser.add_argument(
        "--architecture", help="one that has such models, such as HAttentionForCausalLM (default: the first)"
    )
    parser.add_argument("--out", type=path, required=True, help="a folder to write to, which holds no model yet")


def run(args: argparse.Namespace) -> int:
    from loglinear_jax.hub import export_params, save_model
    from loglinear_jax.hub.folders import CONFIG
    from loglinear_jax.runs.errors import NoReadableCheckpoint
    from loglinear_jax.settings import SettingError

    quiet_libraries()
    if (args.out / CONFIG).exists():  # of a model, or of a run
        raise BadInput(f"--out: {args.out} holds a {CONFIG} already: expected another folder")
    try:
        model, params, tokenizer, _ = trained_of_run(args)
    except (SettingError, NoReadableCheckpoint) as error:
        raise BadInput(error) from error
    try:
        export_params(model.settings, params, args.architecture)  # before anything is made
        check_folder(args.out, "--out")
        save_model(args.out, model.settings, params, args.architecture)
    except ValueError as error:
        raise BadInput(error) from error
    tokenizer.save(str(args.out / "tokenizer.json"))
    print(f"Written to {args.out}")
    return 0


if __name__ == "__main__":
    from loglinear_jax.commands.main import main

    sys.exit(main(command="export", called="python -m loglinear_jax.commands.export"))
