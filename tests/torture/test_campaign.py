"""A small sample of the campaign, and proofs that it can find something."""

import json
from pathlib import Path

import pytest

from tests.torture import __main__ as campaign
from tests.torture import judge, pool, settings
from tests.torture.judge import Outcome

SAMPLES = {"settings": 25, "calls": 12}  # .ci/run draws some of the others, which take longer


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_sample_of_the_campaign_finds_nothing(kind, tmp_path, capsys):
    out = tmp_path / "counts.json"
    code = campaign.main(
        [kind, f"--number={SAMPLES[kind]}", "--seed=7", "--workers=1", f"--out={out}", f"--folder={tmp_path}"]
    )
    assert code == 0, capsys.readouterr().out
    counts = json.loads(out.read_text(encoding="utf-8"))["counts"][kind]
    assert counts["cases"] == sum(counts["ended"].values()) == SAMPLES[kind] and counts["failures"] == 0


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--folder={}/missing", "--folder: {}/missing is not a folder: expected one that exists"),
        ("--folder={}/file", "--folder: {}/file is not a folder: expected one that exists"),
        ("--out={}/missing/counts.json", "--out: {}/missing can't be written: No such file or directory"),
        ("--foldr={}", "unrecognized argument --foldr={} (did you mean --folder?)"),
    ],
)
def test_wrong_usage_is_one_line(argument, message, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert campaign.main(["calls", "--number=1", argument.format(tmp_path)]) == 2
    assert capsys.readouterr() == ("", f"python -m tests.torture: {message.format(tmp_path)}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_case_is_made_from_its_seed_and_number_alone():
    for kind in pool.KINDS:
        cases = [[str(pool.made_case(kind, seed, number)) for number in range(30)] for seed in (0, 0, 1)]
        assert cases[0] == cases[1] != cases[2]


@pytest.mark.parametrize(
    ("message", "failure"),
    [
        ("run.py: train.num_steps must be at least 1, got 0\n", None),
        ("", "no message"),
        ("run.py: must be at least 1, got 0\n", "does not name it"),
        ("run.py: train.num_steps\nis wrong\n", "several lines"),
        ("run.py: train.num_steps " + 400 * "x", "a long line"),
        ("Traceback (most recent call last):\n  File\nValueError: num_steps\n", "traceback"),
    ],
)
def test_a_message_is_one_short_line_that_names_what_is_at_fault(message, failure):
    found = judge.line_failure(message, ("num_steps",))
    assert found == failure or found.startswith(f"{failure}: ")


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """Runs a settings case in this process after a change of the code that checks settings."""
    monkeypatch.chdir(tmp_path)

    def run(bug):
        monkeypatch.setattr(settings, "checked_experiments", bug)
        return settings.run_case(
            settings.Case(
                ("--config=mqar:smoke", "--config.train.num_steps=7"), ("num_steps",), "train.num_steps", "7"
            ),
            tmp_path,
        )

    return run


def test_a_planted_bug_is_found(planted):
    def fails(config):
        return 1 / 0

    def writes(config):
        Path("written").touch()
        return {}, {}

    assert planted(settings.checked_experiments) == Outcome("accepted")
    assert planted(fails).failure.startswith("traceback: ZeroDivisionError")
    assert planted(writes).failure == "written before training: ['written']"


def test_a_setting_that_is_read_as_another_is_found(planted, tmp_path):
    case = settings.Case(("--config=mqar:smoke", "--config.train.num_steps=7"), ("num_steps",), "train.num_steps", "8")
    assert settings.run_case(case, tmp_path).failure == "accepted: train.num_steps='8' was read as 7"


@pytest.mark.parametrize(
    ("text", "value"), [("nan", 1.0), ("1.5", 1), ("3", 4), ("true", False), ("a", "b"), ("0", None)]
)
def test_a_text_does_not_mean_another_value(text, value):
    assert not settings.means(text, value)


def test_a_hang_a_crash_and_a_bug_of_the_campaign_are_failures(tmp_path):
    worker = pool.Worker(tmp_path)
    try:
        assert worker.ask(("settings", 0, []), 60) == Outcome("prepared")
        assert worker.ask(("no_such_kind", 0, 1), 60).ended == "error of the campaign"
        assert worker.ask(("settings", 0, 1), 0.0).failure.startswith("hang: ")
        assert worker.process is None
    finally:
        worker.end()
