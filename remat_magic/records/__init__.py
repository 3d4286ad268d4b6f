"""The records that an inspection is made of: plain data, without any jax object.

Everything downstream of the analysis (text, HTML, the widget) reads these and nothing else, so a report can be kept,
compared with ``==``, pickled and shown where JAX is not installed. Importing this module does not import jax.

Units: ``nbytes`` and every ``*_bytes`` are bytes, every ``*_flops`` are floating-point operations. ``None`` where a
number is expected means *unknown*; it is never replaced by a guess.
"""

from __future__ import annotations

from remat_magic.errors import RematError
from remat_magic.records.base import Displayed, Labelled, Listed
from remat_magic.records.comparison import Comparison, ComparisonRow, Offloading, Places
from remat_magic.records.edit import Advice, Edit, EditedName, FileEdit, WhatIf
from remat_magic.records.fit import Fit, FitChoice
from remat_magic.records.measurement import (
    Collective,
    Effort,
    Exhausted,
    ExhaustedBuffer,
    GradientDifference,
    Measurement,
    Progress,
    XlaBuffer,
    XlaMemory,
)
from remat_magic.records.plan import Plan, PlannedValue
from remat_magic.records.report import (
    TEXTLESS,
    Choice,
    Equation,
    Kernel,
    Kind,
    Note,
    NoteKind,
    Origin,
    Parameter,
    Program,
    ProgramLine,
    Reader,
    RecomputationKind,
    Report,
    Residual,
    Unit,
    dearest,
)
from remat_magic.records.source import GradientCall, Site, SourceSpan, SourceText
from remat_magic.records.timeline import (
    ArgumentRole,
    Half,
    Life,
    LiveKind,
    LiveValue,
    Moment,
    Phase,
    StepMemory,
    Timeline,
    Times,
)

__all__ = [
    "TEXTLESS",
    "Advice",
    "ArgumentRole",
    "Choice",
    "Collective",
    "Comparison",
    "ComparisonRow",
    "Displayed",
    "Edit",
    "EditedName",
    "Effort",
    "Equation",
    "Exhausted",
    "ExhaustedBuffer",
    "FileEdit",
    "Fit",
    "FitChoice",
    "GradientCall",
    "GradientDifference",
    "Half",
    "Kernel",
    "Kind",
    "Labelled",
    "Life",
    "Listed",
    "LiveKind",
    "LiveValue",
    "Measurement",
    "Moment",
    "Note",
    "NoteKind",
    "Offloading",
    "Origin",
    "Parameter",
    "Phase",
    "Places",
    "Plan",
    "PlannedValue",
    "Program",
    "ProgramLine",
    "Progress",
    "Reader",
    "RecomputationKind",
    "RematError",
    "Report",
    "Residual",
    "Site",
    "SourceSpan",
    "SourceText",
    "StepMemory",
    "Timeline",
    "Times",
    "Unit",
    "WhatIf",
    "XlaBuffer",
    "XlaMemory",
    "dearest",
]
