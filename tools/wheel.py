"""Build and check the wheels for an index: manylinux_2_28, x86_64 and aarch64, with the CPU kernels inside.

python tools/wheel.py               both into dist/, each built twice: the same bytes, whose SHA-256 is printed
python tools/wheel.py --only x86_64 one of them, once, without the rounds of csrc/fuzz; part of CI

The compiler is that of the `ziglang` package, which targets glibc 2.28 and both processors. `auditwheel` must find the
tag. The wheel of this machine is installed into a folder outside the repository, where one forward is compared with the
reference experts without a compiler, with an empty cache. The portable kernels of both wheels run the rounds of
csrc/fuzz and must give one digest: those for aarch64 under qemu-aarch64 (Debian: qemu-user), where it is installed.
"""

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hatch_build import MACHINE, load_toolchain

ROOT = Path(__file__).resolve().parent.parent
MACHINES = ("x86_64", "aarch64")
TAG = "manylinux_2_28"
COPIED = ("moe_mk", "configs", "hatch_build.py", "pyproject.toml", "README.md", "LICENSE")
"""What a wheel is made of; a second build in a folder of another name finds paths that got into the files."""
ROUNDS = 40
FORWARD = """
import torch, moe_mk
from moe_mk.kernels.native import selfcheck

found = selfcheck.load(which=lambda name: None)
assert "prebuilt" in found.path.parts, found.path
H, I, E, K = 256, 128, 8, 2
generator = torch.Generator().manual_seed(0)
draw = lambda *shape: torch.randn(*shape, generator=generator)
w = {"gate.weight": (draw(E, H) / H**0.5).bfloat16()}
for e in range(E):
    for name, shape in (("gate", (I, H)), ("up", (I, H)), ("down", (H, I))):
        w[f"experts.{e}.{name}_proj.weight"] = (draw(*shape) / shape[1] ** 0.5).bfloat16()
model = {"hidden_size": H, "moe_intermediate_size": I, "num_experts": E, "quant": {"weights": "bf16"}}
def layer(experts):
    settings = {"model": model, "router": {"top_k": K}, "kernel": {"experts": experts}}
    return moe_mk.MoELayer(moe_mk.MoEConfig.parse(settings, "settings")).load_weights(w)
x = draw(16, H).bfloat16()
with torch.no_grad():
    got, want = (layer(experts)(x).double() for experts in ("cpu_native", "reference"))
    error = float((got - want).norm() / want.norm())
assert error < 0.01, error
print(f"{found.best.name}, relative error {error:.1e}")
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--only", choices=MACHINES, help="build this wheel alone, once")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    machines, once = ((options.only,), True) if options.only else (MACHINES, False)
    failed = [problem for machine in machines for problem in check(machine, options.out, once=once)]
    failed += [] if once else problems_of_bits()
    for problem in failed:
        print(f"FAILED    {problem}")
    return 1 if failed else 0


def check(machine: str, out: Path, *, once: bool) -> list[str]:
    """Build the wheel for one kind of processor into `out`; what is wrong with it."""
    wheel = build(machine, out)
    digest, problems = hashlib.sha256(wheel.read_bytes()).hexdigest(), []
    print(f"wheel     {wheel.name}, {wheel.stat().st_size:,} bytes, SHA-256 {digest}", flush=True)
    if not once:
        with tempfile.TemporaryDirectory(prefix="another-name-") as folder:
            copy = Path(folder) / "source"
            for name in COPIED:
                source = ROOT / name
                shutil.copytree(source, copy / name) if source.is_dir() else shutil.copy(source, copy / name)
            again = build(machine, Path(folder), copy).read_bytes()
        if again != wheel.read_bytes():
            problems.append(f"{wheel.name}: a second build has the SHA-256 {hashlib.sha256(again).hexdigest()}")
    shown = run([sys.executable, "-m", "auditwheel", "show", str(wheel)])
    if not is_allowed(shown, machine):
        problems.append(f"{wheel.name}: auditwheel does not find {TAG}_{machine} or an older one: {shown}")
    if machine == platform.machine():
        print(f"forward   {forward(wheel)}", flush=True)
    return problems


def is_allowed(shown: str, machine: str) -> bool:
    """Whether auditwheel shows `TAG` for a wheel, or that of an older glibc."""
    found = re.search(rf"platform\s+tag:\s+\"(\w+)_{machine}\"", shown)
    return found is not None and found[1].startswith("manylinux_2_") and int(found[1][12:]) <= int(TAG[12:])


def build(machine: str, out: Path, source: Path = ROOT) -> Path:
    """One wheel of `source`, whose kernels are compiled for `machine`."""
    with tempfile.TemporaryDirectory(prefix="moe_mk-build-") as made:
        run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", made], source, {MACHINE: machine})
        (wheel,) = Path(made).glob("*.whl")
        return Path(shutil.copy(wheel, out / wheel.name))


def forward(wheel: Path) -> str:
    """Compare one forward of the installed wheel with a reference, without a compiler, a cache or this repository."""
    with tempfile.TemporaryDirectory(prefix="moe_mk-site-") as folder:
        site, user = Path(folder) / "site", Path(folder) / "user"
        user.mkdir()
        install = ["install", "--no-deps", "--no-index", "--quiet", "--target", str(site), str(wheel)]
        run([sys.executable, "-m", "pip", *install], Path(folder))
        stated = run([sys.executable, "-W", "ignore", "-c", FORWARD], Path(folder),
                     {"PYTHONPATH": str(site), "PATH": "", "HOME": str(user)})  # fmt: skip
        assert not (user / ".cache").exists(), "kernels were compiled"
    return stated.strip()


def problems_of_bits() -> list[str]:
    """Run the portable kernels of every machine that runs here; a problem if their digests differ."""
    digests = {}
    with tempfile.TemporaryDirectory(prefix="moe_mk-bits-") as folder:
        for machine in MACHINES:
            runner = [] if machine == platform.machine() else [shutil.which(f"qemu-{machine}") or ""]
            if runner == [""]:
                print(f"bits      {machine}: not run, qemu-{machine} is not installed")
                continue
            printed = run([*runner, str(driver(machine, Path(folder))), str(ROUNDS)]).strip()
            print(f"bits      {machine}{', emulated' if runner else ''}: {printed}", flush=True)
            digests[machine] = printed.rpartition(" ")[2]
    return [f"bits differ: {digests}"] if len(set(digests.values())) > 1 else []


def driver(machine: str, folder: Path) -> Path:
    """The program of csrc/fuzz for one kind of processor; static, since the emulator has no libraries of it."""
    toolchain = load_toolchain(ROOT)
    own = folder / machine
    own.mkdir()
    compiler = toolchain.zig_compiler(own, f"{machine}-linux-musl").path
    fuzz = [toolchain.Unit(toolchain.SOURCES / "fuzz" / name, ("-std=c++17", "-pthread", "-O1"))
            for name in ("main.cpp", "peers.cpp")]  # fmt: skip
    objects = toolchain.compile_objects(compiler, [*toolchain.units(machine), *fuzz], own)
    program = own / "fuzz"
    run([compiler, "-pthread", "-static", "-o", str(program), *map(str, objects)])
    return program


def run(command: Sequence[str], folder: Path = ROOT, more: dict[str, str] | None = None) -> str:
    """What a command prints; its whole output in the error if it fails."""
    ended = subprocess.run(command, cwd=folder, env=os.environ | (more or {}), capture_output=True, text=True)
    if ended.returncode != 0:
        raise SystemExit(f"{' '.join(command[:6])} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    return ended.stdout


if __name__ == "__main__":
    sys.exit(main())
