"""Folders of config.json and safetensors: read, written, and what is wrong with them named."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loglinear_jax.hub import LAYOUTS, import_params, load_model, save_model
from loglinear_jax.hub.folders import INDEX, TOKENIZER, WEIGHTS, find_folder, stop_tokens
from tests.hub.checkpoints import write


def assert_same(a, b):
    assert a[0] == b[0]
    jax.tree.map(np.testing.assert_array_equal, a[1], b[1])


@pytest.mark.parametrize("architecture", LAYOUTS)
def test_one_file_or_several_and_back(tmp_path, architecture):
    config, arrays = write(tmp_path / "one", architecture)
    expected = import_params(arrays, config)
    assert_same(load_model(tmp_path / "one"), expected)
    write(tmp_path / "several", architecture, shards=3)
    assert_same(load_model(str(tmp_path / "several")), expected)
    save_model(tmp_path / "written", *expected, architecture)
    assert_same(load_model(tmp_path / "written"), expected)


def test_a_home_folder_is_found_and_an_address_refused(tmp_path, monkeypatch):
    config, arrays = write(tmp_path / "one")
    monkeypatch.setenv("HOME", str(tmp_path))
    save_model("~/written", *import_params(arrays, config))
    assert_same(load_model("~/written"), load_model(tmp_path / "one"))
    for call in (load_model, lambda folder: save_model(folder, *import_params(arrays, config))):
        with pytest.raises(ValueError, match="gs://bucket/x is an address: expected a path on this machine"):
            call("gs://bucket/x")


def test_bfloat16_is_read(tmp_path):
    config, arrays = write(tmp_path, dtype=jnp.bfloat16)
    expected = import_params(
        {name: jnp.asarray(x, jnp.bfloat16) for name, x in arrays.items()}, config, dtype="bfloat16"
    )
    assert_same(load_model(tmp_path, dtype="bfloat16"), expected)


def edit(folder, change, file="config.json"):
    config = json.loads((folder / file).read_text(encoding="utf-8"))
    change(config)
    (folder / file).write_text(json.dumps(config), encoding="utf-8")


def holding(file, content):
    """Writes a file of the folder anew; None removes it."""
    return lambda f: (f / file).unlink() if content is None else (f / file).write_bytes(content)


def of_config(**fields):
    return lambda f: edit(f, lambda config: config.update(fields))


def of_index(**files):
    return lambda f: edit(f, lambda index: index["weight_map"].update(files), INDEX)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
THIRD = "model-00003-of-00003.safetensors"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (holding("config.json", None), "config.json is missing: expected it beside the weights"),
        (holding("config.json", b"["), "config.json cannot be read as JSON: "),
        (holding("config.json", b"[]"), "config.json holds a list: expected a mapping"),
        (of_config(head_dim="8"), "model: config has head_dim='8': expected a whole number"),
        (holding(WEIGHTS, LFS), "cannot be read as safetensors: it only names the file, for Git LFS: run git lfs pull there$"),
        (holding(WEIGHTS, b"\xff" * 100), "model.safetensors cannot be read as safetensors: "),
        (holding(WEIGHTS, None), "has neither model.safetensors nor model.safetensors.ind"),
        (holding(THIRD, None), "00003-of-00003.safetensors is missing: model.*index"),
        (lambda f: edit(f, lambda i: i.pop("weight_map"), INDEX), "index.json has no mapping weight_map"),
        (of_index(lm_head="../x"), "index.json: weight_map has '../x': expected the name of a file beside it$"),
        (of_index(lm_head=["x"]), r"index.json: weight_map has \['x'\]: expected the name of a file beside it$"),
        (of_index(lm_head="\ud800"), r"index.json: weight_map has '\\ud800': expected the name of a file beside it$"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_folder_is_named(tmp_path, change, message):
    write(tmp_path / "model", shards=3 if "index" in message else 1)
    change(tmp_path / "model")
    with pytest.raises(ValueError, match=message) as raised:
        load_model(tmp_path / "model")
    assert str(tmp_path / "model") in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nothing-here", "is not a folder: expected one with config.json, or owner/name on the model hub"),
        ("owner/name/../../..", "is not a folder: expected one with config.json, or owner/name on the model hub"),
        (__file__, "is not a folder: expected one with config.json"),
        (3, "^model is 3: expected a folder with config.json, or owner/name"),
        ("a" * 300, "^model 'a*… can't be read: .*File name too long"),
    ],
)
def test_what_cannot_be_a_model_is_named(model, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_model(model)


def test_a_model_is_saved_with_the_tokens_that_end_a_text(tmp_path):
    config, arrays = write(tmp_path / "first")
    model = import_params(arrays, config)
    for given, written in ((None, ()), (3, (3,)), ((3, 18), (3, 18))):
        save_model(tmp_path / "saved", *model, eos_token_id=given)
        assert stop_tokens(tmp_path / "saved", 19) == written
    with pytest.raises(ValueError, match="eos_token_id=19: expected a token id from 0 to 18"):
        save_model(tmp_path / "saved", *model, eos_token_id=19)
    edit(tmp_path / "saved", lambda c: c.update(eos_token_id=True))
    with pytest.raises(ValueError, match="config has eos_token_id=True: expected a token id from 0 to 18"):
        stop_tokens(tmp_path / "saved", 19)
    for folder, message in (
        (3, "^folder is 3: expected the name of one"),
        ("", "^folder is '': expected"),
        ("a\0", "^a\0: "),
    ):
        with pytest.raises(ValueError, match=message):
            save_model(folder, *model)


def test_a_name_is_looked_up_on_the_hub(tmp_path, monkeypatch):
    config, arrays = write(tmp_path / "inside")
    asked = []

    def snapshot_download(name, allow_patterns, ignore_patterns):
        asked.append((name, allow_patterns, ignore_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert_same(load_model("somebody/models/inside"), import_params(arrays, config))
    patterns = ["inside/*.json", "inside/*.safetensors", "inside/merges.txt", *TOKENIZER]
    assert asked == [("somebody/models", patterns, ["inside/*/*"])]
    assert find_folder("somebody/models/inside") == (tmp_path / "inside", tmp_path)
    for model, config_file in (("somebody/models/other", "other/config.json"), ("somebody/models", "config.json")):
        with pytest.raises(
            ValueError, match=f"^{model}: somebody/models on the model hub has no {config_file}: expected"
        ):
            load_model(model)


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch):
    def snapshot_download(name, **patterns):
        raise OSError("no route to host\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(
        ValueError,
        match="^somebody/model is not a folder, and could not be downloaded from the model hub: no route to host$",
    ):
        load_model("somebody/model")
