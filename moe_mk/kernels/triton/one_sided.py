"""Dispatch and combine through the memory of peers, on pointers of their windows.

    window of a rank   [ dispatch flag of each source | combine flag of each peer | rows of source 0 |
                         rows of source 1 | ... | sums of source 0 | sums of source 1 | ... ]

`send_rows` copies each token once to each destination rank, and the last program of a launch sets one flag per peer:
the number of rows and the call, in one word. `await_flags` polls the flags of all sources a limited number of times and
reports late ones. `show` signals peers that sums are ready; `pull_sums` adds them in rank order, in f32, rounded once.
Positions are computed before, in token order: equal inputs give equal bits. There is no host synchronisation, and calls
are counted on the device: a launch can be captured in a CUDA graph and replayed.

Reads and writes T x (destination ranks) rows, in units of 16 bytes: the alignment hint is on the pointer, because an
address computed from an integer has no known alignment. Flags are stored with release and loaded with acquire semantics
at system scope, so that earlier writes are visible to a rank that reads a flag, over NVLink too. The protocol is that
of `prepare_finalize/one_sided/buffers.py`; it is similar to DeepEP's low-latency kernels and FlashInfer's one-sided
all-to-all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_mk.errors import ShapeError
from moe_mk.kernels.triton.numerics import to_dtype

FLAG_BYTES = 128
WORDS = 1024
"""32-bit words that a program moves at a time."""
COLUMNS = 1024
LOOKS = 1 << 26
"""Polls of a flag before a source counts as late."""
ON_TIME, LATE = 0, 1


@dataclass(frozen=True)
class Windows:
    """The windows of all ranks as mapped by one rank."""

    bases_W: Tensor
    """int64. The address of each rank's window, this rank's own included."""
    rank: int
    max_rows: int
    """M, the most rows a source may send to a rank."""
    row_bytes: int
    sum_bytes: int

    def __post_init__(self) -> None:
        wrong = {name: size for name in ("row_bytes", "sum_bytes") if (size := getattr(self, name)) % 16}
        if wrong:
            raise ShapeError(f"rows are copied in units of 16 bytes: {wrong} must be multiples of 16; pad them")

    @property
    def size(self) -> int:
        return self.bases_W.shape[0]

    @property
    def rows_at(self) -> int:
        """Where rows begin, behind two flags a rank."""
        return 2 * self.size * FLAG_BYTES

    @property
    def sums_at(self) -> int:
        """Return the offset in bytes at which sums begin."""
        return self.rows_at + self.size * self.max_rows * self.row_bytes

    @property
    def num_bytes(self) -> int:
        """Of one window; it starts as zeros."""
        return self.sums_at + self.size * self.max_rows * self.sum_bytes

    def rows(self, own: Tensor) -> Tensor:
        """(W, M, bytes of a row) of this rank's own window, by source."""
        return own[self.rows_at : self.sums_at].view(self.size, self.max_rows, self.row_bytes)

    def sums(self, own: Tensor) -> Tensor:
        """(W, M, bytes of a sum) of this rank's own window, by source: what experts write."""
        return own[self.sums_at :].view(self.size, self.max_rows, self.sum_bytes)


def slots_of(visits_WT: Tensor) -> Tensor:
    """int32 (W, T): the place of each token among those sent to a rank, in token order; -1 where it does not go."""
    places_WT = torch.cumsum(visits_WT.to(torch.int32), dim=1, dtype=torch.int32) - 1
    return torch.where(visits_WT, places_WT, -1)


def send_rows(windows: Windows, rows_WTB: Tensor, slots_WT: Tensor, call_1: Tensor, done_1: Tensor) -> None:
    """Write the rows of tokens to their destination ranks and set a flag at each.

    rows_WTB: uint8 (W, T, bytes of a row); a row may differ by rank, or be expanded over ranks. call_1: int64, the
    number of the last call; counted up by this one. done_1: int32 zero, and zero again afterwards.
    """
    ranks, tokens = slots_WT.shape
    counts_W = slots_WT.amax(dim=1).to(torch.int64) + 1 if tokens else torch.zeros_like(windows.bases_W)
    words = rows_WTB.view(torch.int32) if rows_WTB.stride(0) == 0 else rows_WTB.contiguous().view(torch.int32)
    _send_rows[(max(tokens, 1), ranks)](
        words, slots_WT, counts_W, windows.bases_W, call_1, done_1, tokens, words.stride(0) // 4, windows.rank,
        windows.max_rows, windows.rows_at, ROW_WORDS=windows.row_bytes // 4, WORDS=WORDS, FLAG=FLAG_BYTES, num_warps=4,
    )  # fmt: skip


def show(windows: Windows, call_1: Tensor) -> None:
    """Signal every peer that the sums of its rows are ready."""
    _show[(windows.size,)](
        windows.bases_W, call_1, windows.rank, windows.size, FLAG=FLAG_BYTES, num_warps=1
    )  # fmt: skip


def await_flags(
    windows: Windows, call_1: Tensor, *, sums: bool, looks: int = LOOKS, active_W: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Wait for the flags of all ranks. Returns counts (int32, 0 for late ranks) and ON_TIME or LATE per rank.

    Counts are values stored by peers, up to 2^31 - 1: compare them with `max_rows` before use as a size.

    sums: wait for the flags of `show` instead of `send_rows`. active_W: int32, 0 for ranks to skip; read at every
    launch. Never traps: the status can be read later.
    """
    if active_W is None:
        active_W = torch.ones(windows.size, dtype=torch.int32, device=windows.bases_W.device)
    counts_W, status_W = (torch.empty(windows.size, dtype=torch.int32, device=windows.bases_W.device) for _ in range(2))
    _await_flags[(windows.size,)](
        windows.bases_W, call_1, counts_W, status_W, active_W, windows.rank, windows.size * int(sums), looks,
        FLAG=FLAG_BYTES, num_warps=1,
    )  # fmt: skip
    return counts_W, status_W


def pull_sums(windows: Windows, slots_WT: Tensor, status_W: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
    """Sum the rows of all ranks for each token: (T, H). Late ranks, by status_W, are skipped."""
    ranks, tokens = slots_WT.shape
    y_TH = torch.empty((tokens, hidden), dtype=dtype, device=slots_WT.device)
    if y_TH.numel():
        _pull_sums[(tokens, triton.cdiv(hidden, COLUMNS))](
            windows.bases_W, slots_WT, status_W, y_TH, tokens, windows.rank, windows.max_rows, windows.sums_at,
            windows.sum_bytes, hidden, RANKS=ranks, COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip
    return y_TH


@triton.jit
def _send_rows(
    words_ptr, slots_ptr, counts_ptr, bases_ptr, call_ptr, done_ptr, tokens, fours_a_rank, rank, max_rows, rows_at,
    ROW_WORDS: tl.constexpr, WORDS: tl.constexpr, FLAG: tl.constexpr,
):  # fmt: skip
    token, peer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + peer * tokens + token, mask=token < tokens, other=-1)
    if slot >= 0:
        there = tl.load(bases_ptr + peer) + rows_at + (rank * max_rows + slot).to(tl.int64) * (4 * ROW_WORDS)
        # NOTE: the hint must be on the pointer; on the integer before the cast it is lost, and stores are 4 bytes.
        to_ptr = tl.multiple_of(there.to(tl.pointer_type(tl.int32)), 16)
        from_ptr = tl.multiple_of(words_ptr + peer * fours_a_rank * 4 + token * ROW_WORDS, 16)
        for start in tl.static_range(0, ROW_WORDS, WORDS):
            word = start + tl.arange(0, WORDS)
            tl.store(to_ptr + word, tl.load(from_ptr + word, mask=word < ROW_WORDS), mask=word < ROW_WORDS)
    # Every program counts itself after writing its row; the last one publishes all rows.
    tl.debug_barrier()
    programs = tl.num_programs(0) * tl.num_programs(1)
    if tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="gpu") == programs - 1:
        call = tl.load(call_ptr) + 1
        for other in range(tl.num_programs(1)):
            word = (call << 32) | tl.load(counts_ptr + other)
            flag = tl.load(bases_ptr + other) + rank * FLAG
            tl.atomic_xchg(flag.to(tl.pointer_type(tl.int64)), word, sem="release", scope="sys")
        tl.store(call_ptr, call)
        tl.store(done_ptr, 0)


@triton.jit
def _show(bases_ptr, call_ptr, rank, size, FLAG: tl.constexpr):
    flag = tl.load(bases_ptr + tl.program_id(0)) + (size + rank) * FLAG
    word = tl.load(call_ptr) << 32
    tl.atomic_xchg(flag.to(tl.pointer_type(tl.int64)), word, sem="release", scope="sys")


@triton.jit
def _await_flags(
    bases_ptr, call_ptr, counts_ptr, status_ptr, active_ptr, rank, first, looks, FLAG: tl.constexpr
):  # fmt: skip
    source = tl.program_id(0)
    call = tl.load(call_ptr)
    flag = (tl.load(bases_ptr + rank) + (first + source) * FLAG).to(tl.pointer_type(tl.int64))
    # An atomic add of 0 with acquire is an acquiring load. Call numbers only grow, so a fast peer is not missed.
    word = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    looked = 1
    looks = tl.where(tl.load(active_ptr + source) != 0, looks, 1)
    while ((word >> 32) < call) & (looked < looks):
        word = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        looked += 1
    late = (word >> 32) < call
    tl.store(counts_ptr + source, tl.where(late, 0, tl.minimum(word & 0xFFFFFFFF, 0x7FFFFFFF)).to(tl.int32))
    tl.store(status_ptr + source, late.to(tl.int32))


@triton.jit
def _pull_sums(
    bases_ptr, slots_ptr, status_ptr, out_ptr, tokens, rank, max_rows, sums_at, sum_bytes, width,
    RANKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for peer in tl.static_range(RANKS):
        slot = tl.load(slots_ptr + peer * tokens + token)
        kept = (slot >= 0) & (tl.load(status_ptr + peer) == 0)
        there = tl.load(bases_ptr + peer) + sums_at + (rank * max_rows + slot).to(tl.int64) * sum_bytes
        from_ptr = tl.multiple_of(there.to(tl.pointer_type(out_ptr.dtype.element_ty)), 16)
        total += tl.load(from_ptr + column, mask=(column < width) & kept, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + column, to_dtype(total, out_ptr.dtype.element_ty), mask=column < width)
