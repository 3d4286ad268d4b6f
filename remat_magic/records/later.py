"""Records that are worked out when somebody first looks into them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar


class Later:
    """A record that is worked out when it is first looked into: shown, compared, copied or pickled."""

    __slots__ = ("_work_out",)
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]  # every subclass is a dataclass
    _work_out: Callable[[], Any]
    _working_out: ClassVar = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        """A field that is not filled in yet."""
        fields = [field.name for field in dataclasses.fields(self)]
        if name not in fields:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        with self._working_out:
            try:
                work_out = object.__getattribute__(self, "_work_out")
            except AttributeError:  # another thread has done it meanwhile
                return object.__getattribute__(self, name)
            record = work_out()
            for field in fields:
                object.__setattr__(self, field, getattr(record, field))
            object.__delattr__(self, "_work_out")
        return object.__getattribute__(self, name)


@dataclass(frozen=True, slots=True)
class Remark(Later):
    """A sentence that takes work to find out, which is done when it is first looked at; empty where there is none."""

    text: str = ""
    # Of its own: the work waits for a trace, which may be looking at programs.
    _working_out: ClassVar = threading.RLock()

    @classmethod
    def later(cls, find_out: Callable[[], Remark]) -> Remark:
        """The remark that ``find_out`` gives, which is called at most once to the end."""
        remark = cls.__new__(cls)
        object.__setattr__(remark, "_work_out", find_out)
        return remark
