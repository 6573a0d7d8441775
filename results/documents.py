"""One table of the losses that `loglinear_jax evaluate` found for each seed: python results/documents.py TABLE.csv FILE...

FILE: the documents.json of an evaluation with --model_seed.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path


def rows(files: list[str]):
    for file in files:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
        [seed] = re.findall(r"--model_seed=(\d+)", found["command"])
        for measure in found["measures"]:
            documents = measure["documents"]
            for index, group in enumerate(measure["groups"]):
                if tokens := sum(document["tokens"][index] for document in documents):
                    row = dict(seed=seed, measure=measure["name"], group=group, tokens=tokens)
                    for model in documents[0]["sums"]:
                        loss = sum(document["sums"][model][index] for document in documents) / tokens
                        row[model.partition("+train.")[0]] = f"{loss:.4f}"
                    yield row


if __name__ == "__main__":
    table, *files = sys.argv[1:]
    found = list(rows(files))
    with open(table, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, found[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
