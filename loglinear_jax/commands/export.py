"""Write a run's language model as config.json, safetensors and tokenizer, in the layout of flash-linear-attention.

loglinear_jax export --workdir=runs/wikitext2 --variant=linear --out=my-model
"""

from __future__ import annotations

import argparse

from loglinear_jax.command_line import BadInput, Failed, check_folder, path, quiet_libraries
from loglinear_jax.commands.trained_models import add_run_arguments, trained_of_run

LONGEST_OF_OTHERS = 16_384  # tokens that λ has levels for in flash-linear-attention's and Guo et al.'s code
HELP = "a run's language model in the layout of flash-linear-attention"
EXTRA = "text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workdir", type=path, required=True, help="folder of a run")
    add_run_arguments(parser)
    help_of_architecture = (
        "target architecture, such as HAttentionForCausalLM (default: the first that has such models)"
    )
    parser.add_argument("--architecture", help=help_of_architecture)
    parser.add_argument("--out", type=path, required=True, help="folder to write to, which has no model yet")


def run(args: argparse.Namespace) -> int:
    from loglinear_jax.fenwick import num_levels
    from loglinear_jax.hub import export_params, save_model
    from loglinear_jax.hub.folders import CONFIG
    from loglinear_jax.runs.writing import replace_file

    quiet_libraries()
    model, params, tokenizer, _, ends, *_ = trained_of_run(args, args.workdir, stops=True)
    try:
        export_params(model.settings, params, args.architecture)  # before anything is made
        longest = model.settings.max_length
        if model.settings.has_lam and num_levels(longest) != num_levels(LONGEST_OF_OTHERS):
            raise BadInput(
                f"{args.workdir}: λ has {num_levels(longest)} levels, for model.max_length={longest}, and that of "
                f"flash-linear-attention {num_levels(LONGEST_OF_OTHERS)}: train with model.max_length={LONGEST_OF_OTHERS}, "
                "which task.seq_len may be below"
            )
    except ValueError as error:
        raise BadInput(error) from error
    check_folder(args.out, "--out")
    for pattern in (CONFIG, "tokenizer.json", "*.safetensors", "*.safetensors.index.json"):
        if found := next(args.out.glob(pattern), None):  # of a model, or of a run
            raise BadInput(f"--out: {args.out} holds a {found.name} already: expected another folder")
    try:
        save_model(args.out, model.settings, params, args.architecture, eos_token_id=next(iter(ends), None))
    except ValueError as error:  # of the disk alone, as the model itself was exported above
        raise Failed(f"--out: {error}") from error
    replace_file(args.out / "tokenizer.json", lambda file: file.write(tokenizer.to_str(pretty=True)))
    print(f"Written to {args.out}")
    return 0
