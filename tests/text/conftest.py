"""A few lines of text, and a byte-level BPE learned from them."""

import contextlib
import functools
import http.server
import itertools
import random
import threading

import numpy as np
import pytest
from tokenizers import ByteLevelBPETokenizer

WORDS = "the of heron river north built in 1887 é ñandú 東京 bridge was opened ; @-@ , . <unk> state".split()  # noqa: SIM905


def make_text(num_lines, seed=0):
    """Headings, paragraphs and blank lines, as in WikiText."""
    rng = random.Random(seed)
    lines = []
    for _ in range(num_lines):
        kind = rng.random()
        words = " ".join(rng.choices(WORDS, k=rng.randint(3, 40)))
        lines.append(" \n" if kind < 0.2 else f" = {words[:20]} = \n" if kind < 0.3 else f" {words} \n")
    return "".join(lines)


def without_blank(text):
    return "".join(line for line in text.splitlines(keepends=True) if line.strip())


def documents_of(corpus, split):
    """Each document decoded, after checking that an end token stands before and behind it."""
    tokens, starts = getattr(corpus, split), corpus.starts[split]
    end = corpus.manifest["end_token"]
    assert len(tokens) == starts[-1] + 1 and (tokens[starts] == end).all() and np.sum(tokens == end) == len(starts)
    return [corpus.tokenizer.decode(tokens[a + 1 : b]) for a, b in itertools.pairwise(starts)]


@contextlib.contextmanager
def server(folder):
    """(Its address, the requests that came) of a server of files on this machine, with the headers of the hub."""
    came = []

    class Files(http.server.SimpleHTTPRequestHandler):
        def end_headers(self):
            self.send_header("X-Repo-Commit", "c" * 40)
            self.send_header("ETag", f'"{"d" * 40}"')
            super().end_headers()

        def log_message(self, *args):
            came.append(self.requestline)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, directory=str(folder))) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}", came
        finally:
            running.shutdown()
            thread.join()


@pytest.fixture(scope="session")
def bpe(tmp_path_factory):
    """A folder with vocab.json and merges.txt."""
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([make_text(50)], vocab_size=300, show_progress=False)
    tokenizer.save_model(str(folder))
    return str(folder)


@pytest.fixture
def texts():
    """By the split's name in file names."""
    return {"train": make_text(200, 1), "valid": make_text(20, 2), "test": make_text(30, 3)}
