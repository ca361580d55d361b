"""Native CPU kernels: C++ from the wheel or compiled on first use, called through ctypes, on raw tensors only.

    native = load(cache_dir=None, which=shutil.which, progress=None)      # selfcheck.py; UnsupportedError with reasons
    native = loaded()                                                     # the same, shared by the process
    compile_and_open(on_unit=lambda done, total: ...)                     # with progress; without self-check
    reasons_against(cache_dir, which) -> list[str]                        # does not compile
    native.isas, native.best, native.refused          # Isa.SCALAR < AVX2 < AVX512_VNNI < AVX512_BF16 < AMX_BF16

    layout13 = MatrixLayout(num_outputs=I, num_inputs=H, gated=True, format=Format.FP8)    # packed.py; 1.0x the bytes
    layout2 = MatrixLayout(num_outputs=H, num_inputs=I, gated=False, format=Format.FP8)
    w13 = allocate(native, layout13, num_slots, bias_LX=None)             # PackedMatrix: values_LB uint8, scales_LX
    pack_slot(native, w13, slot, (gate_IH, up_IH), (gate_scales, up_scales), threads=n, name="...")  # WeightError: NaN
    # Format: BF16; FP8, INT8 (f32 scales of blocks, or by_output=True); MXFP8, MXFP4, NVFP4 (above=: its f32 scales)
    # INT4, INT8_GROUPS (parts=PartScales(group, dtype, zeros), zeros=)
    # Q4_K, Q5_K, Q6_K, and Q4_0, Q8_0: MatrixLayout.of_blocks(num_outputs, num_inputs, gated, BlockType.Q4_K)
    touch_slot(native, w13, slot) -> bool                                 # after allocate(..., touch=False)
    unpack_slot(native, w13, slot) -> (gate_IH, up_IH)                    # bit-equal
    w13.copy_slot(source, target)                                         # copies the bytes of one expert

    experts_rows(native, x_RH, ids_RK, weights_RK, w13, w2, mode=ExpertsMode(), x_scales_RX=None, threads=n, isa=None,
                 shared=None)                                             # (w13, w2) of one slot for every row
    experts_grouped(native, x_NH, counts_L, weights_N, w13, w2, ...)      # sorted rows -> [N, H]
    experts_batched(native, x_LSH, counts_L, w13, w2, ...)                # padded blocks -> [L, S, H]
    ExpertsMode(tuning=Tuning(panel_rows, task_pairs, prefetch_bytes, ...))   # 0: built in; the same bits
    route(native, x_TH, gate_EH, bias_E, RouteMode(...), threads=n) -> ids_TK, weights_TK, logits_TE
    ProductCall(native, w)(x_RK, threads=n)                               # one plain matrix of one slot
    NativeLayer(RowsOfExperts(...), shared, Gating(...), Places(...))(x_TH, load_E)        # a whole layer on one rank
    ExchangeLayer(calls, (RowsOfExperts(...), ...), window, moved).begin(...)              # the same between ranks
    quantize_1x128(native, x_TH, ue8m0=False, threads=n) -> values_TH, scales_TX
    count_nans(native, codes, threads=n) -> int
    scratch_bytes(native) -> int; release(native)                         # the kernels' own memory, kept between calls

`threads` is an argument of every function; results do not depend on it, nor on whose threads they are (threads.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_mk.imports import at_first_use

if TYPE_CHECKING:
    from moe_mk.kernels.native.experts_mode import INT8_PART_FORMATS as INT8_PART_FORMATS
    from moe_mk.kernels.native.experts_mode import Activation as Activation
    from moe_mk.kernels.native.experts_mode import ExpertsMode as ExpertsMode
    from moe_mk.kernels.native.experts_mode import Rounding as Rounding
    from moe_mk.kernels.native.experts_mode import Tuning as Tuning
    from moe_mk.kernels.native.experts_mode import wrong_formats as wrong_formats
    from moe_mk.kernels.native.layer import ExchangeLayer as ExchangeLayer
    from moe_mk.kernels.native.layer import Gating as Gating
    from moe_mk.kernels.native.layer import LayerCall as LayerCall
    from moe_mk.kernels.native.layer import NativeLayer as NativeLayer
    from moe_mk.kernels.native.layer import Places as Places
    from moe_mk.kernels.native.layer import PreparedExperts as PreparedExperts
    from moe_mk.kernels.native.layer import RowsOfExperts as RowsOfExperts
    from moe_mk.kernels.native.layer import Stack as Stack
    from moe_mk.kernels.native.layer import Stage as Stage
    from moe_mk.kernels.native.layout import BlockType as BlockType
    from moe_mk.kernels.native.layout import Format as Format
    from moe_mk.kernels.native.layout import MatrixLayout as MatrixLayout
    from moe_mk.kernels.native.layout import PartScales as PartScales
    from moe_mk.kernels.native.library import Isa as Isa
    from moe_mk.kernels.native.library import Native as Native
    from moe_mk.kernels.native.library import compile_and_open as compile_and_open
    from moe_mk.kernels.native.library import release as release
    from moe_mk.kernels.native.library import scratch_bytes as scratch_bytes
    from moe_mk.kernels.native.packed import PackedMatrix as PackedMatrix
    from moe_mk.kernels.native.packed import Shard as Shard
    from moe_mk.kernels.native.packed import allocate as allocate
    from moe_mk.kernels.native.packed import pack_slot as pack_slot
    from moe_mk.kernels.native.packed import scale_block as scale_block
    from moe_mk.kernels.native.packed import touch_slot as touch_slot
    from moe_mk.kernels.native.packed import unpack_output_scales as unpack_output_scales
    from moe_mk.kernels.native.packed import unpack_scales as unpack_scales
    from moe_mk.kernels.native.packed import unpack_slot as unpack_slot
    from moe_mk.kernels.native.packed import unpack_zeros as unpack_zeros
    from moe_mk.kernels.native.prepared import ExpertsCall as ExpertsCall
    from moe_mk.kernels.native.prepared import ProductCall as ProductCall
    from moe_mk.kernels.native.prepared import RouteCall as RouteCall
    from moe_mk.kernels.native.prepared import count_nans as count_nans
    from moe_mk.kernels.native.prepared import experts_batched as experts_batched
    from moe_mk.kernels.native.prepared import experts_grouped as experts_grouped
    from moe_mk.kernels.native.prepared import experts_rows as experts_rows
    from moe_mk.kernels.native.prepared import quantize_1x128 as quantize_1x128
    from moe_mk.kernels.native.prepared import route as route
    from moe_mk.kernels.native.route_mode import RouteMode as RouteMode
    from moe_mk.kernels.native.route_mode import Scoring as Scoring
    from moe_mk.kernels.native.route_mode import is_dense as is_dense
    from moe_mk.kernels.native.selfcheck import is_compiled as is_compiled
    from moe_mk.kernels.native.selfcheck import load as load
    from moe_mk.kernels.native.selfcheck import loaded as loaded
    from moe_mk.kernels.native.selfcheck import reasons_against as reasons_against
    from moe_mk.kernels.native.threads import Threads as Threads
    from moe_mk.kernels.native.threads import described as described
    from moe_mk.kernels.native.threads import engine_runtime as engine_runtime
    from moe_mk.kernels.native.toolchain import find_compiler as find_compiler
else:
    HOMES = {
        "experts_mode": "INT8_PART_FORMATS Activation ExpertsMode Rounding Tuning wrong_formats",
        "layer": "ExchangeLayer Gating LayerCall NativeLayer Places PreparedExperts RowsOfExperts Stack Stage",
        "layout": "BlockType Format MatrixLayout PartScales",
        "library": "Isa Native compile_and_open release scratch_bytes",
        "packed": "PackedMatrix Shard allocate pack_slot scale_block "
        "touch_slot unpack_output_scales unpack_scales unpack_slot unpack_zeros",
        "prepared": "ExpertsCall ProductCall RouteCall count_nans experts_batched experts_grouped experts_rows "
        "quantize_1x128 route",
        "route_mode": "RouteMode Scoring is_dense",
        "selfcheck": "is_compiled load loaded reasons_against",
        "threads": "Threads described engine_runtime",
        "toolchain": "find_compiler",
    }
    __getattr__ = at_first_use(__name__, HOMES)
