"""The processes of the fault harness: a keeper that forks ranks, and what one rank does in one world.

The keeper imports the library once and forks the ranks of every world. It ends them all when its standard input is
closed, which is when the supervisor ends, in whatever way; ranks are killed by the kernel when the keeper ends.

Everything that a rank has to report is a line of JSON in a file of its own, so that nothing is lost when it is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import hashlib
import importlib
import json
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.comm.groups import ParallelGroups
from moe_mk.config.moe import MoEConfig
from moe_mk.errors import MoEMKError
from moe_mk.kernels.native import exchange
from moe_mk.lab.testing.faults.inject import Injector, Log, sockets
from moe_mk.lab.testing.faults.plans import World
from moe_mk.lab.testing.faults.reference import ReferenceLayer
from moe_mk.layer import MoELayer
from moe_mk.oracle.expected_error import ALL_TOKENS, ONE_TOKEN, error_of
from moe_mk.runner.overlap import run_dual
from moe_mk.trace.clock import now

START_S = 60.0
"""How long ranks may take to meet."""
FAILED = 70
"""The exit code of a rank whose harness failed."""
POLL_S = 0.005
SHM = "/dev/shm/"
PR_SET_PDEATHSIG = 1
AGAIN = 2
"""Calls after `recover()`."""


# The keeper.


def keep(root: Path, modules: Sequence[str]) -> None:
    """Fork ranks, send them signals and note how they end, as lines of JSON on standard input ask; then end them all.

    {"start": folder, "ranks": n} forks ranks for the plan in folder/plan.json; {"signal": number, "folder": ...,
    "rank": r} sends a signal to one that has not ended. An ended rank leaves folder/rank<r>.ended.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ranks: dict[int, tuple[str, int]] = {}
    try:
        for module in modules:
            importlib.import_module(module)
        _warm_up()
        (root / "ready").touch()
        for line in _lines(lambda: _reap(ranks), lambda: bool(ranks)):
            request = json.loads(line)
            if "start" in request:
                for rank in range(request["ranks"]):
                    ranks[_fork(request["start"], rank)] = request["start"], rank
            else:
                target = request["folder"], request["rank"]
                for pid in [pid for pid, place in ranks.items() if place == target]:
                    os.kill(pid, request["signal"])  # not reaped yet, so the number is still its own
    except Exception as problem:
        _write(root / "failed", f"{type(problem).__name__}: {problem}")
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        for pid in ranks:
            os.waitpid(pid, 0)
        if (root / "ready").exists():
            remove_shared_memory(root)
            shutil.rmtree(root, ignore_errors=True)


def _warm_up() -> None:
    """Do once what every rank would: discover plugins, check the native kernels, which survive a fork."""
    torch.set_num_threads(1)
    model = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8}
    config = MoEConfig.parse({"model": model, "router": {"top_k": 2}}, "the fault harness")
    reference = ReferenceLayer(config, 0)
    layer = MoELayer(config).load_weights(reference.tensors)
    layer(reference.tokens(1, 0))
    exchange.ready()
    del layer
    gc.collect()
    gc.freeze()  # ranks collect their own garbage alone


def _lines(reap: Callable[[], None], busy: Callable[[], bool]) -> Iterator[str]:
    """Lines of standard input until it is closed; `reap` is called meanwhile."""
    text = b""
    while True:
        ready, _, _ = select.select([0], [], [], POLL_S if busy() else None)
        if ready:
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, text = (text + data).split(b"\n")
            yield from (line.decode() for line in lines)
        reap()


def _reap(ranks: dict[int, tuple[str, int]]) -> None:
    for pid in list(ranks):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            continue
        folder, rank = ranks.pop(pid)
        ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        note = {"at": now(), "signal": ended_by, "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None}
        with contextlib.suppress(FileNotFoundError):  # the world was given up
            _write(Path(folder) / f"rank{rank}.ended", json.dumps(note))


def _fork(folder: str, rank: int) -> int:
    keeper = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(FAILED)
        _run(Path(folder), rank)
    finally:
        os._exit(FAILED)


def remove_shared_memory(folder: Path) -> list[str]:
    """Remove the files in shared memory that ranks made and that have not been removed; returns their names."""
    left = []
    for log in folder.rglob("rank*.log"):
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            name = json.loads(line).get("shm") if line.startswith('{"shm"') and line.endswith("}") else None
            if name and os.path.exists(name):
                os.unlink(name)
                left.append(name)
    return left


def _write(file: Path, text: str) -> None:
    """Write a file at once: readers see all of it or none."""
    partial = file.with_name(f".{file.name}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)


# A rank.


def _run(folder: Path, rank: int) -> NoReturn:
    """Be one rank of one world, from its fork to its end."""
    errors = os.open(folder / f"rank{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    faulthandler.enable(file=errors)
    faulthandler.register(signal.SIGUSR1, file=errors, all_threads=True)
    try:
        torch.set_num_threads(1)
        plan = World.from_json((folder / "plan.json").read_text(encoding="utf-8"))
        _Rank(plan, rank, folder).live()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(FAILED)
    # As engines end workers: gloo's threads may still hold tensors, and abort the process when it shuts down
    # (torch 2.13, pytorch/pytorch#179291).
    os._exit(0)


class _Rank:
    """One rank: its group, its layers, the fault if it is the victim, and the outcome of each call."""

    def __init__(self, plan: World, rank: int, folder: Path) -> None:
        self.plan, self.rank, self.folder = plan, rank, folder
        self.log = Log(folder / f"rank{rank}.log")
        self.injector = Injector(plan, rank, self.log, self._second_thread)
        self.references = [ReferenceLayer(_config_of(plan), _seed(plan, "layer", n)) for n in range(plan.layers)]
        self.layers: list[MoELayer] = []
        self.groups: ParallelGroups | None = None
        self.failed = False
        self._threads: list[threading.Thread] = []
        self._after_threads = 0

    def live(self) -> None:
        """Meet, build, serve, make one more call after a failure, recover, and leave."""
        self._watch_shared_memory()
        self.log.write(event="alive", pid=os.getpid(), at=now())
        dist.init_process_group(
            "gloo",
            init_method=(self.folder / "meeting").as_uri(),
            rank=self.rank,
            world_size=self.plan.ranks,
            timeout=timedelta(seconds=START_S),
        )
        dist.barrier()
        self.injector.group_sockets = sockets()
        self.injector.watch_signals()
        self.row("build", 0, self._build)
        self.gate("serve")
        self.injector.reach("set-up", 0)
        if self.layers:
            self._serve()
        answer = self.gate("after")
        recover: Callable[[], Any] | None = getattr(self.layers[0], "recover", None) if self.layers else None
        if answer["failed"] and self.plan.recovers and recover is not None:
            self.row("recover", 0, recover)
            del recover
            if self.gate("recovered")["go"]:
                for number in range(AGAIN):
                    self.call("again", len(self.plan.calls) + 1 + number)
        self.gate("leave")

        def tear_down() -> None:
            self.injector.reach("tear-down", 0)
            self.layers.clear()
            self.groups = None
            gc.collect()
            if not self.failed:
                dist.destroy_process_group()

        self.row("tear-down", 0, tear_down)
        self.log.write(event="left", at=now())

    def _build(self) -> None:
        config, plan = _config_of(self.plan), self.plan
        config = config.with_(timeout_s=plan.timeout_s)
        self.groups = ParallelGroups(ep=dist.group.WORLD)
        for number, reference in enumerate(self.references):
            layer = MoELayer(config, groups=self.groups, name=f"layer {number}")
            layer.load_weights(reference.tensors)
            self.injector.wrap(layer)
            self.layers.append(layer)

    def _serve(self) -> None:
        number = 0
        while number < len(self.plan.calls) and not self.failed:
            self.call("serve", number)
            for thread in self._threads:
                thread.join()
            number += 1 + self._after_threads
            self._after_threads = 0
        if self.failed:
            self.call("after", number)

    def call(self, stage: str, number: int, thread: int = 0) -> None:
        """Make one call and compare what it returns; the calls beyond those of the plan repeat its first."""
        calls = self.plan.calls
        call = calls[number] if number < len(calls) else calls[(number - len(calls)) % len(calls)]
        fault, layer, batches = self.plan.fault, call.layer, [counts[self.rank] for counts in call.tokens]
        if fault and fault.victim == self.rank and stage == "serve" and number == fault.call and not thread:
            if fault.kind == "micro_batch":
                batches.append(3)
            elif fault.kind == "other_layer":
                layer = 1 - layer
        reference = self.references[layer]
        inputs = [
            reference.tokens(count, _seed(self.plan, "tokens", number, batch, self.rank))
            for batch, count in enumerate(batches)
        ]
        expected = [reference.expected(x_TH) for x_TH in inputs]
        self.injector.begin(number if stage == "serve" and not thread else -1)
        self.row(
            stage, number, lambda: self._forward(layer, inputs), thread, lambda y: self._judged(layer, y, expected)
        )

    def _forward(self, layer: int, inputs: list[Tensor]) -> list[Tensor]:
        self.injector.begun()
        if len(inputs) == 1:
            return [self.layers[layer](inputs[0])]
        with torch.no_grad():
            return run_dual([self.layers[layer].steps(x_TH) for x_TH in inputs])

    def _judged(self, layer: int, outputs: list[Tensor], expected: list[Tensor]) -> dict[str, object]:
        """Whether outputs are as near to the reference as the number formats of the layer's decision allow."""
        limit = error_of(self.layers[layer].decision)
        digest = hashlib.sha256()
        for batch, (y_TH, want_TH) in enumerate(zip(outputs, expected, strict=True)):
            text = _difference(y_TH, want_TH, limit)
            if text:
                return {"result": "wrong", "text": f"micro-batch {batch}: {text}"}
            digest.update(y_TH.contiguous().view(torch.uint8).numpy().tobytes())
        return {"result": "right", "digest": digest.hexdigest()[:16]}

    def row(
        self,
        stage: str,
        number: int,
        work: Callable[[], Any],
        thread: int = 0,
        judge: Callable[[Any], dict[str, object]] | None = None,
    ) -> None:
        """Do something, and write down what came of it."""
        place = {"stage": stage, "call": number, "thread": thread}
        began = now()
        self.log.write(event="begin", **place, began=began)
        try:
            made = work()
            ended = now()
            outcome = judge(made) if judge else {"result": "right"}
        except BaseException as error:
            ended = now()
            outcome = self._failure(error)
            self.failed = True
            del error
        self.injector.begin(-1)
        self.log.write(event="row", **place, began=began, ended=ended, **outcome)

    def _failure(self, error: BaseException) -> dict[str, object]:
        return {
            "result": "own" if error is self.injector.injected else "error",
            "type": type(error).__name__,
            "typed": isinstance(error, MoEMKError),
            "text": str(error)[:600],
            "peer": getattr(error, "peer", None),
            "where": "" if isinstance(error, MoEMKError) else "".join(traceback.format_exception(error))[-1500:],
        }

    def _second_thread(self) -> None:
        """Make the next call of the plan in a thread, while this thread is within its own call."""
        number = self.injector.call + 1
        self._after_threads = 1
        thread = threading.Thread(target=self.call, args=("serve", number, 1), daemon=True)
        self._threads.append(thread)
        thread.start()
        thread.join(timeout=0.5)

    def gate(self, name: str) -> dict[str, Any]:
        """Wait until the supervisor lets all ranks go on; returns its text."""
        self.log.write(event="gate", gate=name, at=now())
        file = self.folder / f"go-{name}"
        while not file.exists():
            time.sleep(POLL_S)
        answer: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return answer

    def _watch_shared_memory(self) -> None:
        """Write down the names of files in shared memory before they are made: a rank may be killed right after."""

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and str(arguments[0]).startswith(f"{SHM}moe-mk-"):
                self.log.write(shm=str(arguments[0]))

        sys.addaudithook(hook)


def _difference(got_TH: Tensor, want_TH: Tensor, error: float) -> str:
    """Describe the error of an output; empty if it is as near as number formats with this error allow."""
    if got_TH.shape != want_TH.shape:
        return f"shape {list(got_TH.shape)}, expected {list(want_TH.shape)}"
    distance_T, size_T = (got_TH.double() - want_TH).norm(dim=1), want_TH.norm(dim=1)
    relative_T = torch.nan_to_num(distance_T / size_T, nan=torch.inf)
    if len(relative_T) and float(relative_T.max()) > ONE_TOKEN * error:
        token = int(relative_T.argmax())
        return f"token {token} is {float(relative_T[token]):.2e} away, the limit is {ONE_TOKEN * error:.2e}"
    if float(distance_T.norm()) > ALL_TOKENS * error * float(size_T.norm()):
        return f"all tokens are {float(distance_T.norm() / size_T.norm()):.2e} away, the limit {ALL_TOKENS * error:.2e}"
    return ""


def _config_of(plan: World) -> MoEConfig:
    return MoEConfig.parse(plan.config, "the fault harness")


def _seed(plan: World, *what: object) -> int:
    text = " ".join(map(str, (plan.seed, plan.transport, plan.number, *what)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
