"""Train a byte-level BPE tokenizer on the training documents of a corpus.

loglinear_jax tokenizer --corpus=books --vocab_size=16384 --out=tok
"""

from __future__ import annotations

import argparse

from loglinear_jax.command_line import BadInput, check_can_be_made, check_folder, path, size

HELP = "train a tokenizer on documents of your own"
EXTRA = "text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help_of_corpus = "corpus: a folder of documents, a .jsonl file, or a data set on the Hugging Face hub"
    help_of_field = "field of the text in a line of JSON or a row of a data set (default: text)"
    help_of_size = "number of tokens, at least 257 (default: 16384)"
    parser.add_argument("--corpus", required=True, help=help_of_corpus)
    parser.add_argument("--text_field", default="text", help=help_of_field)
    parser.add_argument("--vocab_size", type=size, default=16_384, help=help_of_size)
    parser.add_argument("--out", type=path, required=True, help="folder to write tokenizer.json to")


def run(args: argparse.Namespace) -> int:
    from loglinear_jax.runs.writing import replace_file
    from loglinear_jax.text.sources import cut_line, find_documents
    from loglinear_jax.text.tokenizer import train_tokenizer

    check_can_be_made(args.out, "--out")
    file = args.out / "tokenizer.json"
    if file.exists():
        raise BadInput(f"--out: {file} exists: expected another folder")
    documents = find_documents(args.corpus, args.text_field).texts("train")
    try:
        tokenizer = train_tokenizer((piece for text in documents for piece in cut_line(text)), args.vocab_size)
    except ValueError as error:
        raise BadInput(f"--{error}") from error
    check_folder(args.out, "--out")  # made only now, so that a bad corpus leaves no empty folder behind
    replace_file(file, lambda opened: opened.write(tokenizer.to_str(pretty=True)))
    if (found := tokenizer.get_vocab_size()) < args.vocab_size:
        print(f"The documents make only {found:,} tokens.")
    print(f"Written to {file}")
    return 0
