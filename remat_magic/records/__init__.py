"""The records that an inspection is made of: plain data, without any jax object.

Everything downstream of the analysis (text, HTML, the widget) reads these and nothing else, so a report can be kept,
compared with ``==``, pickled and shown where JAX is not installed. Importing this module does not import jax.

Units: ``nbytes`` and every ``*_bytes`` are bytes, every ``*_flops`` are floating-point operations. ``None`` where a
number is expected means *unknown*; it is never replaced by a guess.
"""

from __future__ import annotations

from remat_magic.errors import RematError as RematError
from remat_magic.records.base import *
from remat_magic.records.comparison import *
from remat_magic.records.edit import *
from remat_magic.records.fit import *
from remat_magic.records.measurement import *
from remat_magic.records.plan import *
from remat_magic.records.report import *
from remat_magic.records.source import *
from remat_magic.records.timeline import *
