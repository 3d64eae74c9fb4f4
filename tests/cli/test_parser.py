"""The same command line everywhere: examples, defaults, hints for misspelt words."""

from __future__ import annotations

import argparse
import importlib
import shlex

import pytest

from ringcoll import __version__
from ringcoll.cli import COMMANDS, _parse, main, synonyms
from tests.cli.own import STAR

commands = pytest.mark.parametrize("command", COMMANDS)


def refused(capsys, words):
    with pytest.raises(SystemExit) as refusal:
        main(words.split())
    printed = capsys.readouterr()
    assert (refusal.value.code, printed.out) == (2, "")
    assert printed.err.count("\n") == 1
    return printed.err


@commands
def test_help_ends_with_examples_that_parse(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "star.py").write_text(STAR)
    with pytest.raises(SystemExit) as done:
        main([command, "--help"])
    out = capsys.readouterr().out
    assert done.value.code == 0
    examples = importlib.import_module(f"ringcoll.cli.{command}").EXAMPLES.splitlines()
    assert len(examples) > 1
    for example in examples:
        assert example in out
        words = shlex.split(example.split("  ")[0])
        args = _parse(words[words.index("ringcoll") + 1 :])
        assert args is not None and args.command == command


@commands
def test_every_option_has_a_help_that_names_its_default(command):
    parser = argparse.ArgumentParser()
    importlib.import_module(f"ringcoll.cli.{command}").add_arguments(parser)
    for action in parser._actions:
        assert action.help, action.dest
        if action.default in (None, False, argparse.SUPPRESS) or action.help == argparse.SUPPRESS:
            continue
        bench = command == "bench" and "(" in action.help  # as nccl-tests shows it
        assert bench or "default" in action.help, action.dest


def test_the_first_help_lists_the_commands(capsys):
    assert main([]) == 2
    out = capsys.readouterr().out
    for name, text in COMMANDS.items():
        assert name in out and text.split(",")[0].split(" ")[0] in out


def test_the_version_is_one_word(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def options_of(command):
    parser = argparse.ArgumentParser()
    importlib.import_module(f"ringcoll.cli.{command}").add_arguments(parser)
    told = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    return {text for action in told for text in action.option_strings}


def test_each_line_of_synonyms_names_options_of_commands():
    """The first word of a line is an option of one command at least, or no hint could name it."""
    options = set().union(*map(options_of, COMMANDS))
    for line in synonyms._LINES.strip().splitlines():
        words = line.split()
        assert words[0] in options
        assert len({*words}) == len(words) > 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("benhc", "ringcoll: 'benhc' is not one of bench, topo, .*; did you mean bench?"),
        ("nonsense", "ringcoll: 'nonsense' is not one of bench, topo"),
        ("model allreduce", "'allreduce' is not one of all_reduce, .*; did you mean all_reduce?"),
        ("verify reduce", "ringcoll verify: unrecognized arguments: reduce; `ringcoll verify "),
        ("model all_reduce --rnaks 4", "there is no option --rnaks; did you mean --ranks?"),
        ("model all_reduce --rnaks=4", "there is no option --rnaks; did you mean --ranks?"),
        ("bench --pase 3", "ringcoll bench: there is no option --pase; did you mean --pace?"),
        ("explain all_reduce --size 1M", "no option --size; did you mean --bytes?"),
        ("model all_reduce --sizes=1K,1M", "no option --sizes; did you mean --bytes?"),
        ("explain all_reduce -b 1M", "no option -b; did you mean --bytes?"),
        ("bench --bytes 1M", "no option --bytes; did you mean --minbytes?"),
        ("tune --maxbytes 1M", "no option --maxbytes; did you mean --max?"),
        ("model all_reduce --nranks 4", "no option --nranks; did you mean --ranks?"),
        ("topo --ranks 0-3", "no option --ranks; did you mean --gpus?"),
        ("explain all_reduce --picture x.svg", "no option --picture; did you mean --plot?"),
        ("bench --bandwidth 1e9", "no option --bandwidth; did you mean --pace?"),
        # --output is near, but hidden: it is for the command's own processes.
        ("bench --outptu x.json", "no option --outptu; `ringcoll bench --help`"),
        ("verify --size 1M", "no option --size; `ringcoll verify --help`"),
        ("explain all_reduce --seed 1", "no option --seed; `ringcoll explain --help`"),
        ("bench --out x.json", "no option --out; did you mean --json?"),
        ("tune --wibble", "ringcoll tune: there is no option --wibble; `ringcoll tune --help`"),
        ("--verison", "ringcoll: there is no option --verison; did you mean --version?"),
        ("explain broadcast --links swich", "'swich' is not one of .*; did you mean switch?"),
        ("model broadcast --bytes 1X", "argument --bytes: size '1X'"),
        ("verify --ranks", "argument --ranks: expected one argument"),
    ],
)
def test_misspelt_words_are_one_line_with_the_nearest(capsys, words, said):
    err = refused(capsys, words)
    first, _, last = said.partition(".*")
    assert first in err and last in err
    assert "--help` lists the options\n" in err
