"""The studies' front door."""

import sys

import pytest

import align
import lab
import ratio
from errors import UserError, run_main


def test_study_gets_its_own_flags(monkeypatch):
    seen = []
    for study in (align, ratio):
        monkeypatch.setattr(study, "main", lambda argv, study=study: seen.append((study.__name__, argv)))
    for name in lab.STUDIES:
        monkeypatch.setattr(sys, "argv", ["lab.py", name, "--model", "tiny"])
        lab.main()
    assert seen == [("align", ["--model", "tiny"]), ("ratio", ["--model", "tiny"])]


@pytest.mark.parametrize("arguments", [[], ["rotio"], ["--model", "tiny"]])
def test_unknown_study_is_one_line(monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["lab.py", *arguments])
    with pytest.raises(UserError, match="the first argument is the study, one of align, ratio"):
        lab.main()
    with pytest.raises(SystemExit) as stop:
        run_main(lab.main)
    assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lab.py", "--help"])
    lab.main()
    assert "lab.py align" in capsys.readouterr().out
