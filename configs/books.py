"""Language modelling on documents of your own, such as books: each of them packed into windows of 4,096 tokens.

    loglinear_jax tokenizer --corpus=books --vocab_size=16384 --out=tok
    python run.py --config=configs/books.py --config.task.corpus=books --config.task.tokenizer=tok

`books` is a folder with train/, valid/ and test/ of .txt files, one a document, or .jsonl files, one document a line; or a
data set on the Hugging Face hub. Documents in a window do not see each other, unless task.cross_documents=True.

Presets, joined by commas: hidden=N, seq=N, smoke (a small model of a few fables that two CPU cores train in under two minutes).
"""

from pathlib import Path

from loglinear_jax.config import apply_presets, default_config, set_hidden, set_seq_len

FABLES = Path(__file__).parent / "fables"  # written for this project


def get_config(preset=None):
    config = default_config("language", "documents")
    config.task.validation_windows = 256
    config.train.update(
        num_seeds=1, num_steps=10_000, batch_size=8, learning_rate=1e-3, warmup_steps=300, schedule="cosine",
        weight_decay=0.1, eval_every=500, eval_batch_size=8, checkpoint_every=1_000, precision="bfloat16", stop_at=None,
    )  # fmt: skip
    return apply_presets(config, preset, PRESETS)


def smoke(config):
    """A small model of a few fables, byte by byte, that two CPU cores train in under two minutes."""
    config.variants = "mlp_softplus"
    config.task.update(corpus=str(FABLES), tokenizer="bytes", seq_len=256, validation_windows=None)
    config.model.update(
        hidden=64, layers=2, head_dim=32, key_dim=32, max_length=1024
    )  # to generate more than 256 bytes
    config.train.update(
        num_steps=120, learning_rate=5e-3, warmup_steps=20, eval_every=20, checkpoint_every=60, precision="float32",
        steps_per_dispatch=20,
    )  # fmt: skip


PRESETS = {"smoke": smoke, "hidden=": set_hidden, "seq=": set_seq_len}
