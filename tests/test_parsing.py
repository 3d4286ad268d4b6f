"""Parsing Python while other threads do."""

import ast
from types import SimpleNamespace

import pytest

from remat_magic import parsing
from remat_magic.parsing import parse_expression, parse_python


@pytest.fixture
def parser(monkeypatch):
    """Puts another parser in the place of Python's: there alone, since pytest parses what it reports."""

    def replace(parse):
        monkeypatch.setattr(parsing, "ast", SimpleNamespace(parse=parse, Name=ast.Name, Load=ast.Load))

    return replace


@pytest.fixture
def asked(parser):
    """What Python's parser was asked; every other time it fails as when another thread's parsing got in between."""
    asked = []

    def disturbed(text, *args, **kwargs):
        asked.append(text)
        if len(asked) % 2:
            raise SystemError("AST constructor recursion depth mismatch (before=147, after=25)")
        return ast.parse(text, *args, **kwargs)

    parser(disturbed)
    return asked


def test_another_threads_parsing_does_no_harm(asked):
    assert ast.unparse(parse_python("x = [1]\n")) == "x = [1]"
    assert ast.unparse(parse_python("f(x)", "eval")) == "f(x)"
    assert len(asked) == 4


def test_a_fault_of_the_parser_itself_is_raised(parser):
    def broken(*_, **__):
        raise SystemError("broken")

    parser(broken)
    with pytest.raises(SystemError, match="broken"):
        parse_python("x")


def test_names_are_not_parsed_and_expressions_once(asked):
    """What is not parsed cannot get in between the parsing of a cell."""
    assert ast.dump(parse_expression("dots_saveable")) == ast.dump(ast.Name("dots_saveable", ast.Load()))
    assert asked == []
    for _ in range(3):
        tree = parse_expression("names(save=['never parsed before'])")
        assert ast.unparse(tree) == "names(save=['never parsed before'])"
    assert len(asked) == 2  # the first of them failed


@pytest.mark.parametrize("text", ["None", "\ufb01t", "not", "a b", "", "x = 1"])
def test_what_is_no_plain_name_is_python_as_ever(text):
    """Keywords, and names that Python writes otherwise: U+FB01 is "fi" to it."""
    try:
        expected = ast.dump(ast.parse(text, mode="eval").body)
    except SyntaxError:
        with pytest.raises(SyntaxError):
            parse_expression(text)
    else:
        assert ast.dump(parse_expression(text)) == expected
