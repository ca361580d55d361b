"""Native CPU kernels: C++ from the wheel or compiled on first use, called through ctypes, on raw tensors only.

    native = load(cache_dir=None, which=shutil.which, progress=None)      # selfcheck.py; UnsupportedError with reasons
    native = loaded()                                                     # the same, shared by the process
    compile_and_open(on_unit=lambda done, total: ...)                     # with progress; without self-check
    reasons_against(cache_dir, which) -> list[str]                        # does not compile
    native.isas, native.best, native.refused          # Isa.SCALAR < AVX2 < AVX512_VNNI < AVX512_BF16 < AMX_BF16
    choice(native, Format.INT4, Rounding.NONE)        # instruction_set.py: that of experts, and the rates that decided

    layout13 = MatrixLayout(num_outputs=I, num_inputs=H, gated=True, format=Format.FP8)    # packed.py; 1.0x the bytes
    layout2 = MatrixLayout(num_outputs=H, num_inputs=I, gated=False, format=Format.FP8)
    w13 = allocate(native, layout13, num_slots, bias_LX=None)             # PackedMatrix: values_LB uint8, scales_LX
    pack_slot(native, w13, slot, (gate_IH, up_IH), (gate_scales, up_scales), threads=n, name="...")  # WeightError: NaN
    # Format: BF16; FP8, INT8 (f32 scales of blocks, or by_output=True); floats of groups (above=: global f32 scales)
    # INT4, INT8_GROUPS (parts=PartScales(group, dtype, zeros, biases), zeros=)
    # Q4_K, Q5_K, Q6_K, Q4_0, Q4_1, Q5_1, Q8_0: MatrixLayout.of_blocks(num_outputs, num_inputs, gated, BlockType.Q4_K)
    touch_slot(native, w13, slot) -> bool                                 # after allocate(..., touch=False)
    unpack_slot(native, w13, slot) -> (gate_IH, up_IH)                    # bit-equal
    w13.copy_slot(source, target)                                         # copies the bytes of one expert

    experts_rows(native, x_RH, ids_RK, weights_RK, w13, w2, mode=ExpertsMode(), x_scales_RX=None, threads=n, isa=None,
                 shared=None)                                             # (w13, w2) of one slot for every row
    ExpertsMode(tuning=Tuning(panel_rows, task_pairs, prefetch_bytes, ...))   # 0: built in; the same bits
    RouteCall(native, gate_EH, bias_E, RouteMode(...))(x_TH, threads=n) -> ids_TK, weights_TK, logits_TE
    ProductCall(native, w)(x_RK, threads=n)                               # one plain matrix of one slot
    PreparedCall(RowsOfExperts(...), shared, Gating(...), Places(...))(x_TH, load_E)      # a whole layer on one rank
    PreparedExchangeCall(calls, (RowsOfExperts(...), ...), window, moved).begin(...)      # the same between ranks
    release(native)                                                       # the kernels' own memory, kept between calls

`threads` is an argument of every function; results do not depend on it, nor on whose threads they are (threads.py).

What a layer needs before it runs these kernels is imported from here, at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_mk.imports import at_first_use

if TYPE_CHECKING:
    from moe_mk.kernels.native.exchange_abi import CCapture as CCapture
    from moe_mk.kernels.native.layer import Gating as Gating
    from moe_mk.kernels.native.layer import Stage as Stage
    from moe_mk.kernels.native.prepared import RouteCall as RouteCall
    from moe_mk.kernels.native.prepared import RouteMode as RouteMode
    from moe_mk.kernels.native.prepared import Scoring as Scoring
    from moe_mk.kernels.native.prepared import is_dense as is_dense
    from moe_mk.kernels.native.selfcheck import loaded as loaded
    from moe_mk.kernels.native.selfcheck import reasons_against as reasons_against
    from moe_mk.kernels.native.toolchain import find_compiler as find_compiler
else:
    HOMES = {
        "exchange_abi": "CCapture",
        "layer": "Gating Stage",
        "prepared": "RouteCall RouteMode Scoring is_dense",
        "selfcheck": "loaded reasons_against",
        "toolchain": "find_compiler",
    }
    __getattr__ = at_first_use(__name__, HOMES)
