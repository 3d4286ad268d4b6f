"""Objects whose classes are defined again: the same content, with the methods of the new class."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from remat_magic.jaxprs.spans import is_user_file

__all__ = ["converted", "converting"]


def converted(value: Any, classes: Mapping[type, type], done: dict[int, Any] | None = None) -> Any:
    """A value in which each object of an old class is a copy of the new class; what holds none is left as it is.

    Args:
        value: an object, or lists, tuples, dictionaries and attributes that hold some.
        classes: the new class of each old one.
        done: what was made of what, by identity.
    """
    done = {} if done is None else done
    if id(value) in done:
        return done[id(value)][1]
    done[id(value)] = value, value  # an object that holds itself
    new = value
    if type(value) in (list, tuple):
        items = [converted(each, classes, done) for each in value]
        if any(made is not each for made, each in zip(items, value, strict=True)):
            new = type(value)(items)
    elif type(value) is dict:
        content = {key: converted(each, classes, done) for key, each in value.items()}
        if any(content[key] is not each for key, each in value.items()):
            new = content
    elif isinstance(getattr(value, "__dict__", None), dict) and _is_users(type(value)):
        content = {key: converted(each, classes, done) for key, each in vars(value).items()}
        changed = {key: made for key, made in content.items() if made is not vars(value)[key]}
        if changed or type(value) in classes:
            new = copy.copy(value)
            for key, made in changed.items():
                object.__setattr__(new, key, made)  # also of frozen dataclasses
            if type(value) in classes:
                object.__setattr__(new, "__class__", classes[type(value)])
    done[id(value)] = value, new
    return new


def converting(function: Callable[..., Any], classes: Mapping[type, type]) -> Callable[..., Any]:
    """A function that takes objects of the old classes and has them converted."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        done: dict[int, Any] = {}
        return function(*converted(args, classes, done), **converted(kwargs, classes, done))

    return called


def _is_users(kind: type) -> bool:
    # What has no file is a notebook's, or built in.
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or "<cell>"
    return kind.__module__ != "builtins" and is_user_file(file)
