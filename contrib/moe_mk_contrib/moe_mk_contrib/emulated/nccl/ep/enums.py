"""`nccl.ep.enums`: names and numbers of the library's choices."""

from enum import IntEnum


class Algorithm(IntEnum):
    """Which kernels serve a group."""

    LOW_LATENCY = 0
    HIGH_THROUGHPUT = 1


class Layout(IntEnum):
    """How received rows lie."""

    UNSET = 0
    EXPERT_MAJOR = 1
    RANK_MAJOR = 2
    FLAT = 3


class PassDir(IntEnum):
    """Forward or backward pass, of high throughput."""

    FWD = 0
    BWD = 1


class OverflowPolicy(IntEnum):
    """What becomes of rows for which there is no room, of high throughput."""

    AUTO = 0
    TRAP = 1
    DROP = 2


class ZeroCopyMode(IntEnum):
    """Whether rows may bypass the library's own buffers."""

    AUTO = 0
    OFF = 1
    ON = 2


class ExpertIdKind(IntEnum):
    """How received ids are numbered."""

    AUTO = 0
    LOCAL = 1
    GLOBAL = 2


class DispatchQuantizationRecipe(IntEnum):
    """What dispatch does with scales."""

    NONE = 0
    FWD = 1
    DS_FP8E3M4 = 2


class CombineQuantizationRecipe(IntEnum):
    """In which format combine sends rows."""

    NONE = 0
    NVFP4 = 1
