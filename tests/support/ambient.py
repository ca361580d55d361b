"""Settings of torch that a program may have made, and that must not change what a layer computes."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


@contextmanager
def _set(setter: Callable[..., object], value: object, before: object) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


@contextmanager
def _autocast(device: str, dtype: torch.dtype) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without a GPU, torch disables that of CUDA and warns
        context = torch.autocast(device, dtype=dtype)
    with context:
        yield


AMBIENT: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast_bf16": lambda: _autocast("cpu", torch.bfloat16),
    "autocast_fp16": lambda: _autocast("cpu", torch.float16),
    "autocast_cuda": lambda: _autocast("cuda", torch.float16),
    "dtype_fp16": lambda: _set(torch.set_default_dtype, torch.float16, torch.get_default_dtype()),
    "dtype_fp64": lambda: _set(torch.set_default_dtype, torch.float64, torch.get_default_dtype()),
    "device_meta": lambda: torch.device("meta"),
    "matmul_medium": lambda: _set(torch.set_float32_matmul_precision, "medium", torch.get_float32_matmul_precision()),
    "flush_denormal": lambda: _set(torch.set_flush_denormal, True, False),
    "threads": lambda: _set(torch.set_num_threads, 2, torch.get_num_threads()),
    "deterministic": lambda: _set(torch.use_deterministic_algorithms, True, False),
    "inference_mode": torch.inference_mode,
    "gradients": torch.enable_grad,
}
