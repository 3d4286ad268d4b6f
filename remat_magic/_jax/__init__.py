"""The one seam to what JAX does not publish, and the only place that branches on a JAX version.

What it is tested with is in ``private.TESTED``. Each branch says which version it is for and why.
"""

# pyright: reportUnusedImport=false
# What is imported here is handed on, as `_jax.bodies`: of the vocabulary all.

from remat_magic._jax.batch_proof import Refused, Share, differing, followed, same_value
from remat_magic._jax.compiling import (
    ENVIRONMENT,
    QUICK,
    automatic_mesh,
    bytecode,
    calls_back,
    compile_program,
    on_devices_here,
    propagated,
)
from remat_magic._jax.formulas import communication, product
from remat_magic._jax.gradients import *
from remat_magic._jax.hlo import *
from remat_magic._jax.jaxprs import *
from remat_magic._jax.primitives import *
from remat_magic._jax.private import JAX_VERSION, Lack, is_tested, lacks, reading, require
from remat_magic._jax.settings import *
from remat_magic._jax.shardings import *
from remat_magic._jax.transforms import (
    NO_BREAK,
    VmapCall,
    behind_boundary,
    cut,
    has_other_bits,
    is_boundary,
    joined,
    mapping,
    why_no_vmaps,
)
from remat_magic._jax.watch import Jitted, Stopped, find, watching
