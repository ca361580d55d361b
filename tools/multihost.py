"""Two hosts on one machine: a layer run over both by torchrun, verified, and then the cable between them is cut.

    python tools/multihost.py --checkpoint build/ds3-tiny --ranks-per-host 2

A host is a network namespace with an address of its own; a veth pair is the cable. Every transport runs the very
commands of a real cluster (docs/multihost.md), which are printed. Needs the right to make namespaces: root's, or a
user's own.
Exit status 0: all is well, or this machine does not permit it, and then the reason is printed.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

TRANSPORTS = ("all_to_all", "all_gather", "hierarchical", "one_sided_network")
CUT = ("all_to_all", "one_sided_network")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
NETWORK = "10.213.7.0/30"
PORT = 29517
INSIDE = "--inside-namespaces"
LATE_S = 5.0
"""How late a peer may be when the cable is cut."""
PATIENCE_S = 240.0
"""How long any command may take, torch's imports included."""
FLOWING_BYTES = 1_000_000
"""So much over the cable is more than meeting takes: forwards are under way."""


def commands_of(name: str, options: argparse.Namespace, words: Sequence[str]) -> list[list[str]]:
    """What a person types on each of the hosts; printed. words: further options of moe-mk run."""
    made = []
    for host in range(2):
        launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(options.ranks_per_host)]
        launcher += ["--node-rank", str(host), "--master-addr", ADDRESSES[0], "--master-port", str(PORT)]
        made.append([sys.executable, *launcher, "-m", "moe_mk", "run", str(options.checkpoint), *words])
        print(f"{name if host == 0 else '':<12} host {host}: {shlex.join(made[-1])}", flush=True)
    return made


class Hosts:
    """Two network namespaces joined by a cable, and what runs in them; nothing outlives the `with`."""

    def __init__(self) -> None:
        self.names = tuple(f"moe-mk-{os.getpid()}-{letter}" for letter in "ab")
        self._made: list[str] = []

    def __enter__(self) -> Self:
        try:
            for name in self.names:
                ip("netns", "add", name)
                self._made.append(name)
            first, second = self.names
            ip(*f"link add cable0 netns {first} type veth peer name cable0 netns {second}".split())
            for name, address in zip(self.names, ADDRESSES, strict=True):
                ip("-n", name, "addr", "add", f"{address}/30", "dev", "cable0")
                for device in ("lo", "cable0"):
                    ip("-n", name, "link", "set", device, "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End what runs on the hosts, and the hosts."""
        for name in self._made:
            for pid in ip("netns", "pids", name).split():
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    continue
            ip("netns", "del", name)
        self._made = []

    def start(self, host: int, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a command on one host, with its output in a file."""
        cores = {"GLOO_SOCKET_IFNAME": "cable0", "OMP_NUM_THREADS": "1"}
        with log.open("wb") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.names[host], *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | cores,
            )

    def sent_bytes(self) -> int:
        """What has left the first host over the cable."""
        counter = "/sys/class/net/cable0/statistics/tx_bytes"
        done = subprocess.run(
            ["ip", "netns", "exec", self.names[0], "cat", counter], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    def cut(self) -> None:
        ip("-n", self.names[0], "link", "set", "cable0", "down")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--transports", nargs="+", default=list(TRANSPORTS))
    parser.add_argument("--cut", nargs="*", default=list(CUT), help="transports under which the cable is cut")
    parser.add_argument("--link", default="auto", help="kernel.network_link of one_sided_network")
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    given = list(sys.argv[1:] if arguments is None else arguments)
    if reason := reason_against(inside=options.inside_namespaces):
        if options.inside_namespaces or not may_have_namespaces_of_its_own():
            print(f"skipped   two hosts on one machine: {reason}")
            return 0
        inside = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--", sys.executable, __file__, INSIDE]
        return subprocess.run([*inside, *given], check=False).returncode
    with tempfile.TemporaryDirectory(prefix="moe-mk-") as folder:
        failures = [verified(options, name, Path(folder)) for name in options.transports]
        failures += [cut_short(options, name, Path(folder)) for name in options.cut]
    return int(any(failures))


def verified(options: argparse.Namespace, transport: str, folder: Path) -> bool:
    """Run the layer over both hosts and let it verify itself; whether that failed."""
    words = ("--tokens", "16", "--repeats", "1", *pinned(transport, options.link))
    commands = commands_of(transport, options, words)
    with Hosts() as hosts:
        logs = [folder / f"{transport}-{host}" for host in range(2)]
        codes = ended([hosts.start(host, commands[host], logs[host]) for host in range(2)])
        crossed = hosts.sent_bytes()
    stated = logs[0].read_text(errors="replace")
    passed = codes == [0, 0] and "PASS" in stated
    print(f"{'ok' if passed else 'FAILED':<9} {transport} over two hosts, {crossed:,} B left the first one", flush=True)
    if not passed:
        report(logs, codes)
    return not passed


def pinned(transport: str, link: str) -> tuple[str, ...]:
    """The options that choose a transport; our own receives the meeting address, gloo its environment."""
    if transport != "one_sided_network":
        return ("--prepare-finalize", transport)
    chosen = () if link == "auto" else ("--set", f"kernel.network_link={link}")
    return ("--prepare-finalize", transport, "--network", NETWORK, *chosen)


def cut_short(options: argparse.Namespace, transport: str, folder: Path) -> bool:
    """Cut the cable under a run that would go on for hours; whether any host did not say why it ended in time."""
    words = ("--tokens", "16", "--repeats", "1000000", "--no-verify", "--timeout", f"{LATE_S:g}")
    commands = commands_of("cut", options, (*words, *pinned(transport, options.link)))
    with Hosts() as hosts:
        logs = [folder / f"cut-{transport}-{host}" for host in range(2)]
        running = [hosts.start(host, commands[host], logs[host]) for host in range(2)]
        flowing = waited_for(lambda: hosts.sent_bytes() > FLOWING_BYTES, running)
        hosts.cut()
        start = time.monotonic()
        reported = flowing and waited_for(lambda: all("phase '" in log.read_text(errors="replace") for log in logs), [])
        seconds = time.monotonic() - start
        codes = ended(running)
    stated = [log.read_text(errors="replace") for log in logs]
    limit = f"{LATE_S:g} s [kernel.timeout_s]"
    passed = reported and all(limit in text for text in stated) and 0 not in codes
    what = f"{transport}: both hosts named the lost peer {seconds:.1f} s after the cut"
    print(f"{'ok' if passed else 'FAILED':<9} {what}", flush=True)
    for host, text in enumerate(stated):
        print(*(f"          host {host}: {line}" for line in text.splitlines() if "phase '" in line), sep="\n")
    if not passed:
        report(logs, codes)
    return not passed


def reason_against(*, inside: bool) -> str:
    """Why this machine permits no namespaces, as far as it is known; empty if it does."""
    if shutil.which("ip") is None:
        return "the command ip is missing (Debian: apt install iproute2)"
    if inside:  # a mount namespace of our own: what `ip netns` writes stays in it
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=False, stderr=subprocess.DEVNULL)
    try:
        with Hosts():
            return ""
    except (subprocess.CalledProcessError, OSError) as problem:
        return f"{getattr(problem, 'stderr', '') or problem}".strip()


def may_have_namespaces_of_its_own() -> bool:
    """Whether an ordinary user may be root of namespaces of its own."""
    if shutil.which("unshare") is None:
        return False
    probe = ["unshare", "--user", "--map-root-user", "--net", "--mount", "true"]
    return subprocess.run(probe, check=False, capture_output=True).returncode == 0


def waited_for(condition: Callable[[], bool], running: Sequence[subprocess.Popen[bytes]]) -> bool:
    """Wait until something holds; False if it takes too long, or a process has ended before."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline or any(process.poll() is not None for process in running):
            return False
        time.sleep(0.2)
    return True


def ended(running: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """Exit codes; None for what did not end in time."""
    waited_for(lambda: all(process.poll() is not None for process in running), [])
    return [process.poll() for process in running]


def ip(*words: str) -> str:
    """Run `ip`; raises CalledProcessError with its output."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def report(logs: Sequence[Path], codes: Sequence[int | None]) -> None:
    """Print how each host ended, and its output before the launcher reported the end."""
    for host, (log, code) in enumerate(zip(logs, codes, strict=True)):
        stated = log.read_text(errors="replace").splitlines()
        end = next((n for n, line in enumerate(stated) if "elastic" in line), len(stated))
        print(f"host {host} ended with {code}:", *stated[max(end - 25, 0) : end], sep="\n  ")


if __name__ == "__main__":
    sys.exit(main())
