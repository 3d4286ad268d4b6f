"""What ``help()`` says of the public functions: every option, by name, with its type."""

import inspect
import re

import pytest

import remat_magic as rm


def public():
    """The functions that ``remat_magic`` offers, and the methods of its classes."""
    for name in rm.__all__:
        offered = getattr(rm, name)
        if inspect.isfunction(offered):
            yield pytest.param(offered, id=name)
        elif inspect.isclass(offered) and not issubclass(offered, Exception):
            for key, method in inspect.getmembers(offered, inspect.isfunction):
                if not key.startswith("_") and method.__module__.startswith("remat_magic."):
                    yield pytest.param(method, id=f"{name}.{key}")


def test_everything_that_is_asked_for_is_there():
    ids = {parameter.id for parameter in public()}
    assert {"trace", "Trace.plan", "Trace.report", "Comparison.best", "Report.save_html"} <= ids


@pytest.mark.parametrize("function", list(public()))
def test_every_parameter_is_explained(function):
    explained = re.findall(r"^ +\*{0,2}(\w+): ", inspect.getdoc(function) or "", re.MULTILINE)
    if function.__qualname__.startswith("Trace.") and function is not rm.Trace.report:
        explained += SHARED
    parameters = [name for name in inspect.signature(function).parameters if name != "self"]
    assert [name for name in parameters if name not in explained] == []


SHARED = ["policy", "at", "namespace", "device"]


def test_what_methods_share_is_explained_where_help_says_so():
    assert all(f"``{name}``" in (rm.Trace.__doc__ or "") for name in ("report", *SHARED))


@pytest.mark.parametrize("function", list(public()))
def test_every_parameter_has_a_type(function):
    parameters = inspect.signature(function).parameters.values()
    untyped = [one.name for one in parameters if one.annotation is one.empty and one.name != "self"]
    assert untyped == []
    assert inspect.signature(function).return_annotation is not inspect.Signature.empty
