"""The keys of policies: every one says in Python what it says here, and mistakes are told with their mend."""

from __future__ import annotations

import re

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.ad_checkpoint import saved_residuals
from jax.ad_checkpoint import checkpoint_name

import remat_magic as rm
from remat_magic.policies import Key, choices, describe, resolve
from remat_magic.policies.keys import TABLE

NAMES = ("attn_q", "attn_k", "mlp0", "mlp1", "out")


def test_every_policy_of_jax_is_in_the_table():
    ours = {name for choice in choices() for name in (choice.key, *choice.aliases)}
    # jax 0.11 has the classes of what its factories make there, too.
    theirs = {
        name
        for name, policy in vars(jax.checkpoint_policies).items()
        if not name.startswith("_") and not isinstance(policy, type)
    }
    assert theirs <= ours
    assert ours - theirs == {"as_written", "none", "names"}  # what JAX has no policy for


@pytest.mark.parametrize("choice", choices(NAMES), ids=lambda choice: choice.key)
def test_the_code_of_a_choice_makes_the_policy_that_its_key_names(choice):
    if not choice.code:
        assert choice.key in ("as_written", "none")
        return
    made, found = eval(choice.code, {"jax": jax}), resolve(choice.key, NAMES)
    assert describe(made) == describe(found.policy)
    assert found.key == choice.key
    assert resolve(choice, NAMES).code == choice.code


@pytest.mark.parametrize("alias", [alias for choice in choices() for alias in choice.aliases])
def test_an_alias_of_jax_is_the_policy_that_it_is_an_alias_of(alias):
    assert getattr(jax.checkpoint_policies, alias) is resolve(alias).policy


@pytest.mark.parametrize(
    ("key", "saved"),
    [
        ("save_only_these_names('out', 'mlp*')", {"out", "mlp0", "mlp1"}),
        ("save_only_these_names('re:.*_[qk]')", {"attn_q", "attn_k"}),
        ("save_only_these_names('attn_[!q]')", {"attn_k"}),
        ("save_any_names_but_these('attn_*')", {"mlp0", "mlp1", "out"}),
        ("names(save=['out'])", {"out"}),
        ("names(save=['mlp?'], offload=[])", {"mlp0", "mlp1"}),
        ("names()", set()),
        ("names(save=['out', 're:mlp.'])", {"out", "mlp0", "mlp1"}),
        ("save_only_these_names('out') | save_only_these_names('mlp0')", {"out", "mlp0"}),
        ("nothing_saveable", set()),
        ("None", set()),
    ],
)
def test_what_a_key_saves_is_what_jax_saves(key, saved):
    """Asked of JAX: a function whose values have these names, under the policy that the key resolves to."""

    def fun(x):
        for name in NAMES:
            x = jax.numpy.sin(checkpoint_name(x, name))
        return x

    listed = saved_residuals(jax.checkpoint(fun, policy=resolve(key, NAMES).policy), 1.0)
    assert {name for _, source in listed for name in re.findall(r"named '(\w+)'", source)} == saved
    report = rm.trace(fun, 1.0).report(key, at="function")
    assert {residual.name for residual in report.residuals if residual.name} == saved


def test_offloading_by_name():
    key = "names(save=['out'], offload=['mlp*'], offload_dst='pinned_host')"
    found = resolve(key, NAMES)
    assert found.key == (
        "save_and_offload_only_these_names(names_which_can_be_saved=['out'], "
        "names_which_can_be_offloaded=['mlp0', 'mlp1'], offload_src='device', offload_dst='pinned_host')"
    )
    assert describe(found.policy) == found.key
    other = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "unpinned_host")
    assert resolve(other).policy is other  # as one of the user's own
    assert resolve(other).own == (other,)


# What a key can hold: every row, with names of any characters, and policies of one's own.
TEXTS = st.text(max_size=5) | st.sampled_from(["h", "f(x)", "w[0]", "a | b", "'", '"', "re:x", "*", "offload_src"])
LISTS = st.lists(TEXTS, max_size=3).map(repr)
ANSWERING = (
    st.sampled_from(["nothing_saveable", "everything_saveable", "dots_saveable", "checkpoint_dots", "None", "mine"])
    | st.sampled_from(["jax.checkpoint_policies.dots_saveable", "p.best", "make('h', n=2)"])
    | st.builds(
        "{}({})".format,
        st.sampled_from(["save_only_these_names", "save_any_names_but_these", "save_anything_except_these_names"]),
        st.lists(TEXTS, max_size=3).map(lambda names: ", ".join(map(repr, names))),
    )
    | st.builds("names(save={})".format, LISTS)
)
OFFLOADING = (
    st.just("offload_dot_with_no_batch_dims")
    | st.just("offload_dot_with_no_batch_dims(offload_dst='pinned_host')")
    | st.builds("names(save={}, offload={}, offload_src='device')".format, LISTS, LISTS)
)
COMBINED = ANSWERING | st.builds("{} | {}".format, ANSWERING, ANSWERING)
COMBINED |= st.builds("save_from_both_policies({}, {} | {})".format, ANSWERING, ANSWERING, ANSWERING)
KEYS = (COMBINED | OFFLOADING | st.sampled_from(["as_written", "none"])).map(Key.parse)


@settings(max_examples=50, deadline=None)
@given(KEYS)
def test_the_text_of_a_key_is_that_key(key):
    assert Key.parse(str(key)) == key
    assert all(name in str(key) or repr(name)[1:-1] in str(key) for name in key.names)


BOTH = (
    "save_and_offload_only_these_names(names_which_can_be_saved={}, names_which_can_be_offloaded={}, "
    "offload_src='device', offload_dst='pinned_host')"
)


@pytest.mark.parametrize(
    ("key", "renamed"),
    [
        ("nothing_saveable", "nothing_saveable"),
        ("save_only_these_names('f(x)', 'h')", "save_only_these_names('f(x)', 'z')"),
        ("save_only_these_names('h', 'z')", "save_only_these_names('z')"),
        ("save_only_these_names('h')", "save_only_these_names('z')"),
        ("save_any_names_but_these('w[0]', 'h')", "save_any_names_but_these('w[0]', 'z')"),
        ("dots_saveable | names(save=['h'])", "dots_saveable | save_only_these_names('z')"),
        ("names(save=['a'], offload=['h', 'b'])", BOTH.format(["a"], ["z", "b"])),
        ("names(offload=['h'])", BOTH.format([], ["z"])),
    ],
)
def test_names_of_a_key_are_renamed(key, renamed):
    assert str(Key.parse(key).renamed("h", "z")) == renamed


def test_what_a_key_asks_for():
    key = Key.parse("names(save=['attn_*', 're:m.'], offload=['f(x)', 'attn_*'], offload_dst='pinned_host')")
    assert key.names == ("attn_*", "re:m.", "f(x)")  # memories are no names
    key = Key.parse("mine.best | make(n, 'h') | save_only_these_names('a') | jax.checkpoint_policies.dots_saveable")
    assert key.identifiers == {"mine", "make", "n"}
    assert key.names == ("a",)


def test_a_policy_of_ones_own_may_be_called_as_one_of_jaxs():
    def dots_saveable(prim, *_, **__):
        return prim.name == "sin"

    trace = rm.trace(lambda x: jax.numpy.sin(jax.numpy.sin(jax.numpy.dot(x, x))), 1.0)
    own = trace.report(dots_saveable, at="function")
    assert own.recomputed_flops > trace.report("dots_saveable", at="function").recomputed_flops
    assert own.code.endswith("policy=dots_saveable)")


def test_nothing_saved_and_nothing_offloaded_is_nothing_saveable():
    assert resolve("names(save=[], offload=[])", NAMES).key == "nothing_saveable"


def test_a_policy_of_the_users_own_goes_by_the_name_it_has_there():
    def keep_sin(prim, *_, **__):
        return prim.name == "sin"

    found = resolve("mine", namespace={"mine": keep_sin})
    assert (found.key, found.code, found.policy) == ("mine", "mine", keep_sin)
    holder = type("Policies", (), {"best": staticmethod(keep_sin)})
    assert resolve("p.best", namespace={"p": holder}).policy is keep_sin
    # One of JAX's own under another name is JAX's own.
    assert resolve("mine", namespace={"mine": jax.checkpoint_policies.dots_saveable}).key == "dots_saveable"


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        ("dots_savable", "'dots_savable' is not a policy: did you mean 'dots_saveable'?"),
        ("dots saveable", "'dots saveable' is not a policy: did you mean 'dots_saveable'?"),
        ("dots", "'dots' is not a policy: did you mean 'dots_saveable'?"),
        ("attn", f"'attn' is not a policy: choose one of {', '.join(row.key for row in TABLE)}."),
        ("save_all", f"'save_all' is not a policy: choose one of {', '.join(row.key for row in TABLE)}."),
        ("save_only_these_names", "save_only_these_names is a factory: call it, as in "
         "save_only_these_names('attn_q', 'attn_k')."),
        ("save_only_these_names('mpl0')", "'mpl0' is not a checkpoint name of f; it has 'attn_q', 'attn_k', 'mlp0', "
         "'mlp1', 'out'."),
        ("save_only_these_names('re:(')", "'re:(' is not a regular expression: missing ), unterminated subpattern at "
         "position 0."),
        ("save_only_these_names(x)", "the arguments of save_only_these_names are quoted names, as in "
         "save_only_these_names('attn_q', 'attn_k')."),
        ("dots_saveable()", "dots_saveable takes no arguments: write dots_saveable."),
        ("names(save=['out'], offload=['out'])", "'out' cannot be saved and offloaded at once: choose one."),
        ("names(keep=['out'])", "names takes save, offload, offload_src, offload_dst, recompute; not keep."),
        ("names(offload=['out'], offload_dst='unpinned_host')", "a key offloads with offload_src='device', "
         "offload_dst='pinned_host': give the policy object for other memories."),
        ("dots_saveable | none", "none is not a policy to combine: use two of nothing_saveable, everything_saveable, "
         "dots_saveable, dots_with_no_batch_dims_saveable or names."),
        (jax.checkpoint_policies.save_only_these_names, "save_only_these_names is a factory: call it, as in "
         "save_only_these_names('attn_q', 'attn_k')."),
        (7, "a policy is a key such as 'dots_saveable' or a policy function, not int: 7."),
        (dict, "dict is a class, not a policy: pass one of its instances."),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_with_its_mend(policy, sentence):
    with pytest.raises(rm.RematError) as error:
        resolve(policy, NAMES, function="f")
    assert str(error.value) == sentence
