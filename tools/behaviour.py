"""Record the bits of what the tests compare, and compare them with a later state of the code.

python tools/behaviour.py record FILE [TESTS]       write the digests as JSON
python tools/behaviour.py compare FILE [TESTS]      compute them again; print (test, old, new) and exit 1

A digest is the SHA-256 (dtype, shape, bytes) of all tensors that a test passes to a comparison of torch or to
`require_close`, in any order: outputs of transports, experts, pairs of both, layers, routers and number formats. TESTS
are arguments of pytest; by default the quick tests of the rooms that compute. Digests depend on the processor, on torch
and on the number of threads, which are kept as the `machine` of a record: where it differs, nothing is compared and the
program exits 2. Decisions, prices and what verbs print are recorded by tests: tests/oracle/golden.yaml,
tests/architecture/behaviour.json, tests/cli.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_mk.external.device import processor

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = "MOE_MK_BEHAVIOUR"
"""Environment variable of the tests: the file that receives a line for each test."""
ROOMS = "conformance experts kernels layer prepare_finalize quant router runner test_kernel.py weights"
QUICK = "not gpu and not stress and not slow"
OF_TESTS = (f"{ROOT}/tests/", f"{ROOT}/contrib/moe_mk_contrib/tests/", f"{ROOT}/moe_mk/lab/testing/")
"""Source folders in which comparisons are recorded; those inside the library are ignored."""
_digests: list[str] = []


def digest(value: object) -> str:
    """SHA-256 over dtype, shape and bytes of all tensors in a value."""
    total = hashlib.sha256()
    for tensor in tensors_in(value):
        flat = tensor.detach().cpu().contiguous()
        total.update(f"{flat.dtype} {tuple(flat.shape)} ".encode())
        total.update(flat.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def tensors_in(value: object) -> Iterator[Tensor]:
    """Tensors of nested sequences and mappings, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield from tensors_in(value[key])


def install() -> None:
    """Note the arguments of comparisons from now on; before a test imports them by name."""
    from moe_mk.lab.testing import limits

    def noted(compare: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(compare)
        def and_noted(*given: object, **named: object) -> Any:
            plain = all(type(each) in (Tensor, torch.nn.Parameter) for each in tensors_in(given))
            if plain and sys._getframe(1).f_code.co_filename.startswith(OF_TESTS):
                _digests.append(digest(given))
            return compare(*given, **named)

        return and_noted

    for module, name in (
        (torch, "equal"),
        (torch, "allclose"),
        (torch.testing, "assert_close"),
        (limits, "require_close"),
    ):
        setattr(module, name, noted(getattr(module, name)))


def pytest_runtest_logfinish(nodeid: str) -> None:
    """As a plugin: write the digest of a test."""
    if _digests:
        line = json.dumps([nodeid, hashlib.sha256("".join(sorted(_digests)).encode()).hexdigest()])
        with Path(os.environ[OUTPUT]).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        _digests.clear()


def machine() -> dict[str, str]:
    """What bits depend on in addition to the code."""
    instructions = torch.backends.cpu.get_cpu_capability()
    return {"processor": processor(), "instructions": instructions, "torch": torch.__version__}


def computed(tests: Sequence[str]) -> dict[str, Any]:
    """A record of some tests."""
    with tempfile.TemporaryDirectory(prefix="behaviour-") as folder:
        output = Path(folder) / "digests"
        output.touch()
        command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "tools.behaviour", "-m", QUICK, *tests]
        settings = {OUTPUT: str(output), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        subprocess.run(command, cwd=ROOT, env=os.environ | settings, check=False)
        found = dict(json.loads(line) for line in output.read_text(encoding="utf-8").splitlines())
    return {"machine": machine(), "bits": found}


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Tests with different digests, or in one record only."""
    both = ((name, old.get(name, "-"), new.get(name, "-")) for name in sorted({*old, *new}))
    yield from (each for each in both if each[1] != each[2])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("tests", nargs="*", default=[f"tests/{room}" for room in ROOMS.split()])
    options, further = parser.parse_known_args(arguments)
    if options.what == "record":
        text = json.dumps(computed([*options.tests, *further]), indent=1, sort_keys=True)
        options.file.write_text(text + "\n", encoding="utf-8")
        return 0
    old = json.loads(options.file.read_text(encoding="utf-8"))
    if old["machine"] != machine():
        print(f"nothing is compared: recorded on {old['machine']}, this is {machine()}", file=sys.stderr)
        return 2
    found = list(differences(old["bits"], computed([*options.tests, *further])["bits"]))
    for name, was, is_now in found:
        print(f"{name}\n  was {was}\n  is  {is_now}")
    print(f"{len(found)} difference{'s' * (len(found) > 1)}" if found else "no difference")
    return 1 if found else 0


if OUTPUT in os.environ:  # pytest imports plugins before the conftest files
    install()

if __name__ == "__main__":
    sys.exit(main())
