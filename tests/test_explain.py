"""XLA's messages that memory is exhausted, as they stand in logs."""

import jax.numpy as jnp
import pytest

import remat_magic as rm

GIB, MIB = 2**30, 2**20

# Of a TPU that compiles, as it is told in a log, with a prefix on each line.
TPU = """jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory \
in memory space hbm. Used 63.75G of 30.75G hbm. Exceeded hbm capacity by 33.00G.

Total hbm usage >= 65.00G:
    reserved          1.25G
    program          63.75G
    arguments            0B

Program hbm requirement 63.75G:
    global            1.14M
    HLO temp         63.70G (100.0% utilization: Unpadded (63.58G) Padded (63.58G), 0.3% fragmentation (210.89M))

  Largest program allocations in hbm:

  1. Size: 64.00M
     Shape: bf16[1024,245,64]{1,2,0:T(8,128)}
     Unpadded size: 61.25M
     Extra memory due to padding: 2.75M (1.0x expansion)
     XLA label: copy-done.2861
     Allocation type: HLO temp
     ==========================

  2. Size: 2.00G
     Operator: op_name="jit(train_step)/jit(main)/jvp(Model)/h/0/...qhd,...khd->...hqk/dot_general[dimension_numbers=\
(((3,), (3,)), ((0, 2), (0, 2)))]" source_file="MODEL" source_line=2
     Shape: f32[32,4096,4096]{1,2,0:T(8,128)}
     Unpadded size: 2.00G
     XLA label: fusion.1265.remat3 = fusion(custom-call.224, custom-call.241), kind=kOutput
     Allocation type: HLO temp
     ==========================
"""
GPU = """
RuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 6291456 bytes.
BufferAssignment OOM Debugging.
BufferAssignment stats:
             parameter allocation:    1.50MiB
              constant allocation:         0B
     preallocated temp allocation:    6.00MiB
                 total allocation:   12.00MiB
Peak buffers:
        Buffer 1:
                Size: 6.00MiB
                Operator: op_name="jit(f)/jit(main)/concatenate[dimension=0]" source_file="MODEL" source_line=2
                XLA Label: concatenate
                Shape: f32[4096,128,3]
                ==========================

        Buffer 2:
                Size: 384.0KiB
                Entry Parameter Subshape: f32[256,128,3]
                ==========================

"""
REMATERIALIZED = (
    "10-15 16:30:37.29: W hlo_rematerialization.cc:3005] Can't reduce memory use below 21.15GiB (22705764841 bytes) by "
    "rematerialization; only reduced to 90.75GiB (97440000040 bytes), down from 90.75GiB originally\n"
)
GIVEN_UP = "Allocator (GPU_0_bfc) ran out of memory trying to allocate 26.00GiB (rounded to 27917287424)requested by op"
HARMLESS = (
    "Allocator (GPU_0_bfc) ran out of memory trying to allocate 3.37GiB with freed_by_count=0. The caller indicates "
    "that this is not a failure, but this may mean that there could be performance gains if more memory was there.\n"
)

# A text, and what is read off it: bytes that were wanted and available, of which memory and when.
MESSAGES = {
    "TPU compiling": (TPU, 63.75 * GIB, 30.75 * GIB, "device", "compiling"),
    "TPU compiling, soon": (
        "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (17.50G) exceeds available HBM (15.75G).",
        *(17.5 * GIB, 15.75 * GIB, "device", "compiling"),
    ),
    "TPU, one buffer": (
        "RESOURCE_EXHAUSTED: Allocation (size=107374182400) would exceed memory (size=17179869184) :: #a7 "
        "[shape = 'u8[327680,327680]{1,0:T(8,128)(4,1)}', space=hbm, size = 0xff, tag = 'output of xor_fusion@{}'] ::",
        *(107374182400, 17179869184, "device", "compiling"),
    ),
    "TPU loading": (
        "RESOURCE_EXHAUSTED: Error loading program 'jit_step': Attempting to reserve 29.50G at the bottom "
        "of memory. That was not possible. There are 147.50M free, 0B reserved, and 147.50M reservable.",
        *(29.5 * GIB, 147.5 * MIB, "device", "loading"),
    ),
    "TPU running": (
        "ValueError: RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 8.00M. That was not "
        "possible. There are 6.50M free.; (0x0x1_HBM0)",
        *(8 * MIB, 6.5 * MIB, "device", "running"),
    ),
    "TPU, in pieces": (
        "RESOURCE_EXHAUSTED: Could not allocate 10485760 bytes in memory 0x0_HBM0; 4374528 bytes allocatable, "
        "14942208 bytes available",
        *(10485760, 14942208, "device", "running"),
    ),
    "TPU, a kernel": (
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack for %my-kernel = "
        'bf16[2048,4096]{1,0:T(8,128)(2,1)} call(%a), metadata={op_name="jit(f)/pallas_call" source_file="MODEL" '
        "source_line=2}. Scoped allocation with size 24.00M and limit 16.00M exceeded scoped vmem limit by 8.00M.",
        *(24 * MIB, 16 * MIB, "vmem", "compiling"),
    ),
    "GPU running": (GPU, 6291456, None, "device", "running"),
    "GPU, in a log": (
        HARMLESS
        + REMATERIALIZED
        + GIVEN_UP
        + "\nE1015 Execution of replica 0 failed: RESOURCE_EXHAUSTED: Out of memory "
        "while trying to allocate 28804500256 bytes.",
        *(28804500256, 22705764841, "device", "running"),
    ),
    "GPU, the allocator alone": (HARMLESS + GIVEN_UP, 26 * GIB, None, "device", "running"),
    "GPU, a warning": (REMATERIALIZED, 97440000040, 22705764841, "device", "compiling"),
    "GPU, newer": (
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 201.50MiB.",
        201.5 * MIB,
        None,
        "device",
        "running",
    ),
    "GPU, older": (
        "Resource exhausted: Failed to allocate request for 2.99GiB (3206250496B) on device ordinal 0",
        *(3206250496, None, "device", "running"),
    ),
    "GPU, CUDA's allocator": (
        "gpu_async_1 cuMemAllocAsync failed to allocate 1225195446464 bytes: RESOURCE_EXHAUSTED: : out of memory\n"
        " Reported by CUDA: Free memory/Total memory: 22635544576/85095874560",
        *(1225195446464, 22635544576, "device", "running"),
    ),
    "no figures": ("RESOURCE_EXHAUSTED: CUDA_ERROR_OUT_OF_MEMORY: out of memory", None, None, "device", "running"),
}


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("prefix", ["", "2020-05-04 09:05:40.721128: E    1578 xla_util.cc:76] "])
def test_what_was_wanted_and_what_there_was(name, prefix):
    text, *expected = MESSAGES[name]
    text = "".join(f"{prefix}{line}" for line in text.splitlines(keepends=True))
    read = rm.explain(text)
    assert [read.wanted_bytes, read.available_bytes, read.memory, read.when] == expected
    assert read._repr_html_()


def test_buffers_have_their_bytes_types_and_lines(tmp_path):
    model = tmp_path / "model.py"
    model.write_text("def f(q, k):\n    return q @ k\n")
    biggest, copied = rm.explain(TPU.replace("MODEL", str(model))).buffers
    assert (biggest.nbytes, biggest.type, biggest.line, biggest.kind) == (2 * GIB, "f32[32,4096,4096]", 2, "temporary")
    assert biggest.op_name.startswith("jit(train_step)/")
    assert (biggest.what, biggest.source.file, biggest.source.text) == ("dot_general", str(model), "    return q @ k")
    assert (copied.nbytes, copied.type, copied.line, copied.what) == (
        64 * MIB,
        "bf16[1024,245,64]",
        None,
        "copy-done.2861",
    )
    of_gpu = rm.explain(GPU.replace("MODEL", str(model)))
    assert [(one.nbytes, one.type, one.line, one.kind) for one in of_gpu.buffers] == [
        (6 * MIB, "f32[4096,128,3]", 2, ""),
        (384 * 1024, "f32[256,128,3]", None, "argument"),
    ]
    assert dict(of_gpu.parts)["total allocation"] == 12 * MIB
    for name, buffer in {"TPU, one buffer": "u8[327680,327680]", "TPU, a kernel": "bf16[2048,4096]"}.items():
        read = rm.explain(MESSAGES[name][0])
        assert [(one.nbytes, one.type) for one in read.buffers] == [(read.wanted_bytes, buffer)]


def test_it_shows_itself(cells):
    cells.ns["text"] = TPU
    cells.ok("import remat_magic as rm", "rm.explain(text)")
    assert "68.5 GB wanted, 33.0 GB available, 35.4 GB too much" in cells.out
    assert "2.15 GB  f32[32,4096,4096]  temporary  dot_general" in cells.out
    assert "dot_general" in rm.explain(TPU)._repr_html_()
    assert "<script>" not in rm.explain(TPU.replace("MODEL", "<script>"))._repr_html_()


def test_what_jax_raises_here_is_read():
    with pytest.raises(Exception, match="RESOURCE_EXHAUSTED") as raised:
        jnp.zeros((10**7, 10**7)).block_until_ready()
    read = rm.explain(raised.value)
    assert (read.wanted_bytes, read.memory) == (4 * 10**14, "host")


@pytest.mark.parametrize("text", ["", "hello", "RESOURCE_EXHAUSTED: Received message larger than max", HARMLESS])
def test_what_is_no_such_message(text):
    with pytest.raises(rm.RematError, match="give the whole text of the error"):
        rm.explain(text)
