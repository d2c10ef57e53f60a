"""A user's mistake is one line and exit code 2; anything else keeps its traceback.

    python -m pytest tests/test_errors.py
"""

import argparse

import pytest

from errors import Flags, UserError, number, run_main


@pytest.mark.parametrize("parse, text, value", [
    (number(int, 1), "1", 1), (number(int, 0), "0", 0), (number(int), "-7", -7), (number(float, 0), "0", 0.0),
    (number(float, above=0), "1e-6", 1e-6), (number(float, 0, 1), "1", 1.0), (number(int, 0), "10000000", 10**7),
])  # fmt: skip
def test_number_takes(parse, text, value):
    assert parse(text) == value and type(parse(text)) is type(value)


@pytest.mark.parametrize("parse, text, words", [
    (number(int, 1), "0", "at least 1"), (number(int, 1), "1.0", "a whole number at least 1"), (number(int), "", "whole"),
    (number(int, 1), "nan", "whole number"), (number(float, 0), "-0.1", "a number at least 0"),
    (number(float, 0), "nan", "'nan'"), (number(float, above=0), "0", "above 0"), (number(float, above=0), "inf", "above 0"),
    (number(float), "-inf", "a number"), (number(float), "nan", "'nan' is not a number"), (number(float, 0), "ten", "'ten'"),
    (number(float, 0, 1), "1.01", "at least 0 and at most 1"), (number(int, 0, 5), "9" * 400, "at most 5"),
])  # fmt: skip
def test_number_refuses(parse, text, words):
    with pytest.raises(argparse.ArgumentTypeError) as refusal:
        parse(text)
    assert words in str(refusal.value) and str(refusal.value) == str(refusal.value).strip()


def test_flags_raise_instead_of_printing_their_usage(capsys):
    parser = Flags()
    parser.add_argument("--rate", type=number(float, above=0))
    parser.add_argument("--kind", choices=["a", "b"])
    for arguments, words in [(["--rate", "-1"], "--rate"), (["--kind", "c"], "--kind"), (["--other"], "--other")]:
        with pytest.raises(UserError, match=words):
            parser.parse_args(arguments)
    assert parser.parse_args(["--rate", "0.5"]).rate == 0.5
    assert capsys.readouterr() == ("", "")


def test_run_main_prints_one_line_and_exits_with_2(capsys):
    def main():
        raise UserError("--out x: no\n  such   folder")

    with pytest.raises(SystemExit) as stop:
        run_main(main)
    assert stop.value.code == 2
    assert capsys.readouterr() == ("", "error: --out x: no such folder\n")


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyError("k"), RuntimeError("r"), SystemExit(1)])
def test_run_main_lets_everything_else_through(error, capsys):
    def main():
        raise error

    with pytest.raises(type(error)) as caught:
        run_main(main)
    assert caught.value is error and capsys.readouterr().err == ""


def test_interrupt_is_one_line(capsys):
    def main():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stop:
        run_main(main)
    line = capsys.readouterr().err
    assert stop.value.code == 130 and line.count("\n") == 1 and "--resume" in line


def test_run_main_returns_after_success():
    calls = []
    run_main(lambda: calls.append(1))
    assert calls == [1]


def test_user_error_is_a_value_error():
    assert issubclass(UserError, ValueError)
