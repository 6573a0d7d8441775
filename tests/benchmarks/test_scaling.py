"""That what measures several devices runs over them; how fast is for the benchmark."""

import jax
import pytest

from loglinear_jax.benchmarks.scaling import MeshShape, time_attention, time_training
from loglinear_jax.commands.main import main
from tests.benchmarks.test_language_model import SETTINGS

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="takes four devices")
PRESET = dict(batch=1, heads=2, groups=1, key_dim=8, value_dim=8, dtype="float32")


@pytest.mark.parametrize("peer", ["xla", pytest.param("gated_delta", marks=pytest.mark.slow)])
def test_an_attention_over_devices(peer):
    found = time_attention(peer, PRESET | {"delta": peer == "gated_delta"}, 64, devices=4, repeats=1)
    assert found["forward_ms"] > 0 and found["both_ms"] > 0


@pytest.mark.slow
def test_training_over_meshes_is_the_same_training():
    one, four = (time_training(SETTINGS, 2, 16, MeshShape.read(mesh), steps=2) for mesh in ("1x1x1", "1x2x2"))
    assert one["parameters"] == four["parameters"] and one["last_loss"] < one["first_loss"]
    assert [four["first_loss"], four["last_loss"]] == pytest.approx([one["first_loss"], one["last_loss"]], rel=1e-5)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--meshes=2x4", "expected data x fsdp x sequence such as 1x4x1, got '2x4'"),
        ("--meshes=64x64x1", "--meshes: expected at most"),
        ("--devices=4096", "--devices: expected at most"),
    ],
)
def test_what_is_refused(flag, message, capsys):
    assert main(["benchmark", "scaling", flag]) == 2
    assert message in capsys.readouterr().err
