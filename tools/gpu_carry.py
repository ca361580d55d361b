"""What travels to a machine with a GPU and no network, and back: at most 64 MiB each way.

    python tools/gpu_carry.py                     wheels of moe-mk's requirements and tests, into .peers/whl
    python tools/gpu_carry.py --peers             DeepGEMM, and from --vllm WHEEL the Triton kernel of vLLM

torch, triton and numpy are the machine's own. git ignores `.peers`: nothing of it is committed. Compiled kernels and
tuned tiles travel back as archives of less than 16 MiB (`pack`, `unpack`).
"""

import argparse
import io
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = (
    "annotated-doc annotated-types click execnet hypothesis iniconfig markdown-it-py mdurl packaging pluggy pydantic "
    "pydantic_core Pygments pytest pytest-timeout pytest-xdist PyYAML rich safetensors shellingham "
    "sortedcontainers typer typing-inspection typing_extensions"
).split()
"""The library's own requirements and those of its tests, with all that they need in turn. Not scipy (35 MB): only
tests of placements call it."""
PEERS = ("sgl-deep-gemm==0.1.5.post1", "apache-tvm-ffi==0.1.11")
"""The newest that link against torch 2.11. FlashInfer is left out: 59 MiB, and its kernels compile for minutes."""
VLLM_FOLDER = "vllm/model_executor/layers/fused_moe/"
VLLM_FILES = ("fused_moe.py", "experts/triton_moe.py")
"""Files that may define the Triton kernel, by version."""
MIB = 2**20
LIMIT, ARCHIVE, MOST_ARCHIVES = 64 * MIB, 15 * MIB, 4
CACHES = ("tuned", "triton_cache", "deep_gemm_cache")
"""Folders of the work folder that travel back, the most valuable first."""


def command(requirements: Sequence[str], folder: Path, python: str) -> list[str]:
    """The pip command that fetches wheels for another machine, at the versions of continuous integration."""
    target = ["--python-version", python, "--only-binary=:all:", "--platform", "manylinux_2_28_x86_64"]
    older = ["--platform", "manylinux_2_17_x86_64", "--platform", "manylinux2014_x86_64"]
    pins = ["-c", str(ROOT / "constraints.txt"), "-d", str(folder)]
    return [sys.executable, "-m", "pip", "download", "--no-deps", *pins, *target, *older, *requirements]


def take_vllm(wheel: Path, folder: Path) -> list[str]:
    """Copy vLLM's Triton MoE kernel and its H200 configurations out of a wheel; returns the names.

    Raises FileNotFoundError for a wheel without them.
    """
    taken = []
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            inside = name.removeprefix(VLLM_FOLDER)
            tuned = inside.startswith("configs/") and "H200" in inside and "[128,128]" in inside.replace(" ", "")
            if name.startswith(VLLM_FOLDER) and (inside in VLLM_FILES or tuned):
                target = folder / Path(inside).name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))
                taken.append(target.name)
    if not set(taken) & {Path(name).name for name in VLLM_FILES}:
        raise FileNotFoundError(f"{wheel} has none of {', '.join(VLLM_FOLDER + name for name in VLLM_FILES)}")
    return sorted(taken)


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def pack(work: Path, out: Path) -> list[str]:
    """Write the caches of a work folder as archives; returns the folders that did not fit."""
    found = [sorted((work / name).iterdir(), key=_newest) for name in CACHES if (work / name).is_dir()]
    groups = [group for of_cache in found for group in of_cache]
    left_out, archives, room = list[str](), list[list[bytes]](), 0
    for group in groups:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=3) as archived:
            archived.add(group, group.relative_to(work).as_posix())
        body = buffer.getvalue()
        if len(body) > room and len(archives) < MOST_ARCHIVES:
            archives.append([])
            room = ARCHIVE
        if len(body) <= room:
            archives[-1].append(body)
            room -= len(body)
        else:
            left_out.append(group.relative_to(work).as_posix())
    for place, bodies in enumerate(archives):
        with zipfile.ZipFile(out / f"cache-{place}.new", "w", zipfile.ZIP_STORED) as archive:
            for number, body in enumerate(bodies):
                archive.writestr(f"{number}.tar.gz", body)
        (out / f"cache-{place}.new").replace(out / f"cache-{place}.zip")
    return left_out


def unpack(out: Path, work: Path) -> None:
    """Bring the archives of an output folder back into a work folder; compiled kernels are found at their new path."""
    for file in sorted(out.glob("cache-*.zip")):
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                with tarfile.open(fileobj=io.BytesIO(archive.read(name)), mode="r:gz") as one:
                    one.extractall(work, filter="data")
    if (work / "triton_cache").is_dir():
        from moe_mk.lab.tuning.triton_cache import relocate

        relocate(work / "triton_cache")


def _newest(path: Path) -> tuple[float, str]:
    """Kernels in use come first; they matter more than those of earlier sources."""
    return -path.stat().st_mtime, path.name


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="of the machine with the GPU")
    parser.add_argument("--folder", type=Path, default=ROOT / ".peers")
    parser.add_argument("--peers", action="store_true", help="DeepGEMM as well")
    parser.add_argument("--vllm", type=Path, help="a wheel of vLLM, to take its Triton kernel from")
    given = parser.parse_args(arguments)
    fetch = command([*NEEDED, *(PEERS if given.peers else ())], given.folder / "whl", given.python)
    (given.folder / "whl").mkdir(parents=True, exist_ok=True)
    status = subprocess.run(fetch, check=False, timeout=900).returncode
    if given.vllm:
        sys.stdout.write(f"{', '.join(take_vllm(given.vllm, given.folder / 'vllm'))}\n")
    total = size_of(given.folder)
    sys.stdout.write(f"{given.folder}: {total / MIB:.1f} MiB of {LIMIT // MIB}\n")
    return status or int(total > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
