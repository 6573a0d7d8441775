"""That what times the language model, on one device or several, runs it; how fast is for the benchmark."""

import jax
import pytest

from loglinear_jax.benchmarks.attention import time_jax
from loglinear_jax.benchmarks.language_model import time_decoding, time_training
from loglinear_jax.benchmarks.scaling import MeshShape
from loglinear_jax.models import LanguageSettings

SETTINGS = LanguageSettings(
    32, 16, hidden=16, layers=1, heads=1, head_dim=16, key_dim=16, dtype="float32", lam_hidden=4
)
PRESET = dict(batch=1, heads=2, groups=1, key_dim=8, value_dim=8, dtype="float32")
over_devices = pytest.mark.skipif(jax.device_count() < 4, reason="takes four devices")


def test_decoding_runs_and_counts_its_bytes():
    short, long = (time_decoding(SETTINGS, length, decoded=2)["bytes"] for length in (8, 16))
    assert long - short >= 4 * 16 * 16  # one more level of a K x V state in float32


@over_devices
@pytest.mark.parametrize("peer", ["xla", pytest.param("gated_delta", marks=pytest.mark.slow)])
def test_an_attention_over_devices(peer):
    found = time_jax(peer, PRESET | {"delta": peer == "gated_delta"}, 64, repeats=1, devices=4)
    assert found["forward_ms"] > 0 and found["both_ms"] > 0


@over_devices
@pytest.mark.slow
def test_training_over_meshes_is_the_same_training():
    meshes = [MeshShape.read(mesh).mesh(2) for mesh in ("1x1x1", "1x2x2")]
    one, four = (time_training(SETTINGS, 2, 16, 1e9, steps=2, mesh=mesh) for mesh in meshes)
    assert one["tokens_per_second"] * one["ms"] == pytest.approx(1e3 * 2 * 16) and one["utilisation"] > 0
    assert one["parameters"] == four["parameters"] and one["last_loss"] < one["first_loss"]
    assert [four["first_loss"], four["last_loss"]] == pytest.approx([one["first_loss"], one["last_loss"]], rel=1e-5)
