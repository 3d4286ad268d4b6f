"""The magic's line: options off the front, the rest verbatim, and completion."""

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.error import UsageError

from remat_magic.notebook.line import Options, parse
from remat_magic.notebook.magic import RematMagics

PARSER = RematMagics.remat.parser


def read(line):
    return parse(PARSER, line)


@pytest.mark.parametrize(
    "call",
    [
        "f(x, -1)",
        "f('a  b', \"c d\")",
        "f(x)[0]('--text', - 3)",
        "jax.grad(f, argnums=(0, 1))(x, key=lambda v: v['k'])",
        "f(x)  # why not",
        "f({'a': -1.5}['a'])",
        "f",
    ],
)
@pytest.mark.parametrize("options", ["", "--text ", "-p dots_saveable --wrt=0 "])
def test_the_call_is_kept_to_the_letter(options, call):
    assert read(options + call).expression == call


def test_all_options_are_read():
    assert read('-p dots_saveable --site block:3 --wrt 0,params --args "a, b=-1" -o w --text --apply') == Options(
        policy="dots_saveable",
        at="block:3",
        wrt=(0, "params"),
        args="a, b=-1",
        output="w",
        text="short",
        apply=True,
    )


def test_an_empty_line_is_the_defaults():
    assert read("") == read("   ") == Options()


@pytest.mark.parametrize(
    ("line", "policy"),
    [
        ("--policy dots_saveable f(x)", "dots_saveable"),
        ("--policy=dots_saveable f(x)", "dots_saveable"),
        ("-p=dots_saveable f(x)", "dots_saveable"),
        ("--policy save_only_these_names('a', \"b c\") f(x)", "save_only_these_names('a', \"b c\")"),
        ("--policy names(save=['a'], offload=['b(']) f(x)", "names(save=['a'], offload=['b('])"),
        ("--policy \"dots_saveable | save_only_these_names('a')\" f(x)", "dots_saveable | save_only_these_names('a')"),
        ("--policy 'x' f(x)", "x"),
        ("--policy 'a'+'b' f(x)", "'a'+'b'"),
        ("--policy 'it\\'s' f(x)", "it\\'s"),
        ("--policy -1 f(x)", "-1"),
    ],
)
def test_a_value_ends_at_the_first_space_outside_quotes_and_brackets(line, policy):
    options = read(line)
    assert (options.policy, options.expression) == (policy, "f(x)")


@pytest.mark.parametrize(
    ("line", "policy"),
    [
        ("--names a,b", "names(save=['a', 'b'], offload=[])"),
        ("--names save=a,b", "names(save=['a', 'b'], offload=[])"),
        ('--names "offload=c save=a,b"', "names(save=['a', 'b'], offload=['c'])"),
        ("--names save=a --names save=b,attn_*", "names(save=['a', 'b', 'attn_*'], offload=[])"),
        ("--names re:(?=a)b", "names(save=['re:(?=a)b'], offload=[])"),
    ],
)
def test_names_are_read_as_a_policy(line, policy):
    assert read(line).policy == policy


def test_a_semicolon_is_no_part_of_the_call():
    assert read("f(x); ") == Options(expression="f(x)")


def test_text_takes_its_value_after_an_equals_sign_alone():
    assert read("--text=full f(x)") == Options(text="full", expression="f(x)")
    assert read("--text full(x)") == Options(text="short", expression="full(x)")
    assert read("--text -o w f(x)") == Options(text="short", output="w", expression="f(x)")


@pytest.mark.parametrize(
    ("line", "mend"),
    [
        ("--polcy x", "did you mean --policy?"),
        ("--pol x", "did you mean --policy?"),
        ("--zzz", "`%remat?` lists them"),
        ("--policy", "--policy needs a value"),
        ('--args "a', 'lacks its closing "'),
        ("--args f(a", "lacks its closing )"),
        ('--args "a b"', "would stand in the call's brackets"),
        ('--args "a)(b"', "would stand in the call's brackets"),
        ("--text=1", "--text takes short or full"),
        ("--text= f(x)", "--text takes short or full"),
        ("--text(f)(x)", "--text takes no value"),
        ("-o 1x", "the name of a variable"),
        ("-o class", "the name of a variable"),
        ('--wrt "x y"', "0,2 or params"),
        ("--wrt ''", "0,2 or params"),
        ("--names recompute=a", "save= and offload="),
        ("--names save=", "needs at least one name"),
        ("--names ''", "needs at least one name"),
        ("-p dots_saveable --names a", "exclude each other"),
        ("f(x", "not a Python expression"),
        ("y = f(x)", "not a Python expression"),
        ("f(x) --policy dots_saveable", "put --policy in front of it"),
        ("f(x) --text", "put --text in front of it"),
        ("f(x) -p=dots_saveable", "put -p in front of it"),
        ('--args "x" f(x)', "leave out either"),
    ],
)
def test_one_sentence_names_the_mend(line, mend):
    with pytest.raises(UsageError) as caught:
        read(line)
    assert mend in str(caught.value)
    assert str(caught.value).endswith((".", "?"))


def complete(shell, text, cursor=None):
    with provisionalcompleter():
        return [one.text for one in shell.Completer.completions(text, len(text) if cursor is None else cursor)]


def test_completion_of_options(shell):
    assert complete(shell, "%remat --po") == ["--policy"]
    assert complete(shell, "%%remat --text --a") == ["--apply", "--args", "--at"]
    assert complete(shell, "%%remat -p dots_saveable --te") == ["--text"]
    assert "--policy" not in complete(shell, "%%rematch --po")
    assert complete(shell, "x = 1\n%remat --po") == ["--policy"]
    assert complete(shell, "%%remat --po\nf(x)", 12) == ["--policy"]


def test_completion_of_values(cells, engine):
    assert complete(cells.shell, "%remat --policy dots_s") == ["dots_saveable"]
    assert complete(cells.shell, "%remat -p=checkpoint_dots_") == ["checkpoint_dots_with_no_batch_dims"]
    assert "nothing_saveable" in complete(cells.shell, "%%remat --policy ")
    assert complete(cells.shell, "%%remat --text=") == ["full"]
    assert complete(cells.shell, "%%remat --text fu") != ["full"]
    assert complete(cells.shell, "%%remat --site ") == ["function", "sites"]
    assert complete(cells.shell, "%%remat --names sa") == ["save="]
    cells.ok("%%remat", "(lambda x: x)(1.0)")
    assert complete(cells.shell, "%%remat --site bl") == ["block:3"]
    assert complete(cells.shell, "%%remat --names save=a,at") == ["attn_out"]
    assert complete(cells.shell, "%%remat --names a") == ["a", "attn_out"]
    assert complete(cells.shell, "%%remat --policy save_only_these_names('at") == ["attn_out"]


def test_names_that_the_cell_itself_gives_are_offered(shell):
    cell = "%%remat --names hid\nh = checkpoint_name(x @ W, 'hidden')"
    assert complete(shell, cell, len("%%remat --names hid")) == ["hidden"]
