"""`nccl.core`: communicators, data types and the error of arguments that its Python refuses."""

from __future__ import annotations

from enum import IntEnum

import torch

from moe_mk.lab.testing.emulated.exchange import Exchange


class NcclInvalid(Exception):
    """An argument that the Python layer refuses before it calls NCCL."""


class NcclDataType(IntEnum):
    """Element types, with the numbers of nccl.h."""

    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT8E4M3 = 10
    FLOAT8E5M2 = 11


OF_TORCH = {
    torch.int8: NcclDataType.INT8,
    torch.uint8: NcclDataType.UINT8,
    torch.bool: NcclDataType.UINT8,
    torch.int32: NcclDataType.INT32,
    torch.uint32: NcclDataType.UINT32,
    torch.int64: NcclDataType.INT64,
    torch.uint64: NcclDataType.UINT64,
    torch.float16: NcclDataType.FLOAT16,
    torch.float32: NcclDataType.FLOAT32,
    torch.float64: NcclDataType.FLOAT64,
    torch.bfloat16: NcclDataType.BFLOAT16,
    torch.float8_e4m3fn: NcclDataType.FLOAT8E4M3,
    torch.float8_e5m2: NcclDataType.FLOAT8E5M2,
}


def data_type(dtype: torch.dtype) -> NcclDataType:
    """The type of a torch tensor. Raises NcclInvalid for one that NCCL does not have."""
    if dtype not in OF_TORCH:
        raise NcclInvalid(f"Unsupported torch dtype {dtype} has no NCCL equivalent.")
    return OF_TORCH[dtype]


class Communicator:
    """An initialised communicator; emulated ranks meet over an exchange."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    @property
    def ptr(self) -> int:
        """The address of the communicator."""
        return id(self)

    @property
    def nranks(self) -> int:
        """How many ranks there are."""
        return self.exchange.size

    @property
    def rank(self) -> int:
        """This rank."""
        return self.exchange.rank
