"""The rules of the house as pure functions of one source file: who may import, ask and allocate what, and where."""

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain, pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

HOUSE = [
    "errors shapes registry flight files text imports process jobs",
    "quantized comm kernels",
    "config quant tokens weights placement external trace",
    "router prepare_finalize experts permute",
    "kernel oracle runner",
    "layer rebalance",
    "integrations",
    "__init__",
    "lab",
    "__main__",
]
FLOORS: dict[str, int] = {room: floor for floor, rooms in enumerate(HOUSE) for room in rooms.split()}
FAMILIES = 3
GROUND = ("moe_mk.trace.clock", "moe_mk.text")
"""Modules that any room may import, whatever floor theirs stands on: they import nothing of ours."""

# The only imports along a floor: who may import whom, and why. They never form a circle, and families have none.
SIDEWAYS = {
    ("tokens", "quant"): "rows are quantised tensors",
    ("weights", "quant"): "so are weights",
    ("config", "quant"): "a configuration names the scheme of the weights",
    ("weights", "config"): "metadata of GGUF files have the keys of a config.json",
    ("weights", "external"): "GGUF files are read by their own package",
    ("external", "config"): "what is found on a machine is written into a device profile",
    ("trace", "tokens"): "a routing trace is recorded from routings and replayed as routings",
    ("trace", "placement"): "and judged under a placement",
    ("oracle", "kernel"): "phase two hands out the kernel that was decided for",
    ("oracle", "runner"): "and the one that adds in one order where that was decided for",
    ("rebalance", "layer"): "placements of layers change while they serve",
    ("runner", "kernel"): "a tiled kernel runs a kernel tile by tile",
}

OPTIONAL_LIVES_IN = (
    *(f"moe_mk/{room}/" for room in ("kernels/triton", "kernels/native", "kernels/csrc", "external", "integrations")),
    *(f"moe_mk/lab/checkpoints/{name}.py" for name in ("derive", "measured_block", "small_block", "tiny_models")),
    "moe_mk/lab/tuning/triton_cache.py",
)
CLOCKS = [f"time.{name}" for name in ("ctime", "gmtime", "localtime", "clock_gettime", "clock_gettime_ns")]
CLOCKS += [
    f"time.{name}{unit}"
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time")
    for unit in ("", "_ns")
]
CLOCKS += ["datetime.datetime.now", "datetime.datetime.utcnow", "datetime.datetime.today", "datetime.date.today"]
CLOCKS += ["timeit.default_timer"]
PYTHON_LOCKS = [
    f"threading.{name}" for name in "Barrier BoundedSemaphore Condition Event Semaphore Thread Timer".split()
]
PYTHON_LOCKS += ["concurrent.futures", "multiprocessing.pool", "queue"]
ENVIRONMENT = [f"os.{name}" for name in ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")]
ACCELERATORS = ["torch.cuda", "torch.accelerator", "torch.xpu", "torch.mps", "torch.mtia", "torch.get_device_module"]
WORLD_MAKERS = ("init_process_group", "init_device_mesh")
PICKLES = ["pickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"]
ALLOCATORS = {
    f"torch.{name}"
    for name in (
        "arange as_tensor empty empty_strided eye full linspace logspace ones rand randint randn randperm "
        "scalar_tensor tensor tril_indices triu_indices zeros nn.Embedding nn.LayerNorm nn.Linear nn.RMSNorm"
    ).split()
}


@dataclass(frozen=True)
class Source:
    """One module of the package, with what its imported names stand for."""

    path: str
    text: str
    tree: ast.Module = field(init=False)
    names: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tree", ast.parse(self.text, self.path))
        object.__setattr__(self, "names", dict(bound for _, _, bound in _imports(self.nodes) if bound))

    @property
    def room(self) -> str:
        """The file or folder right below the package."""
        return self.path.split("/")[1].removesuffix(".py")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree: rules read it many times."""
        return list(ast.walk(self.tree))

    def imports(self) -> Iterator[tuple[int, str]]:
        """Line and dotted name of everything imported, wherever it stands in the file."""
        yield from ((line, name) for line, name, _ in _imports(self.nodes))
        for call, name in self.calls:
            if (
                name in ("importlib.import_module", "__import__")
                and call.args
                and isinstance(call.args[0], ast.Constant)
            ):
                yield call.lineno, str(call.args[0].value)

    def dotted(self, node: ast.expr) -> str:
        """What an expression names in full, `torch.distributed.all_reduce`; nothing for a local name."""
        if isinstance(node, ast.Attribute):
            owner = self.dotted(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, node.id if node.id == "__import__" else "")
        return ""

    @cached_property
    def uses(self) -> list[tuple[int, str]]:
        """Line and dotted name of everything imported or named."""
        named = [(node.lineno, self.dotted(node)) for node in self.nodes if isinstance(node, ast.Attribute | ast.Name)]
        return [*self.imports(), *((line, name) for line, name in named if name)]

    @cached_property
    def calls(self) -> list[tuple[ast.Call, str]]:
        """Every call of an imported name."""
        named = [(node, self.dotted(node.func)) for node in self.nodes if isinstance(node, ast.Call)]
        return [(node, name) for node, name in named if name]


def _imports(nodes: list[ast.AST]) -> Iterator[tuple[int, str, tuple[str, str] | None]]:
    """Line, dotted name, and the (local name, meaning) that an import binds."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                yield node.lineno, alias.name, (alias.asname, alias.name) if alias.asname else (first, first)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield node.lineno, name, (alias.asname or alias.name, name)


@cache
def package_sources(root: Path = ROOT) -> list[Source]:
    """Every module of the package, as it lies on disk."""
    paths = sorted((root / "moe_mk").rglob("*.py"))
    return [Source(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


Rule = Callable[[Source], Iterator[str]]
RULES: dict[str, Rule] = {}


def rule(check: Callable[[Source], Iterator[tuple[int, str]]]) -> Rule:
    """Register a check under its name; its findings become lines that an editor can open."""

    def findings(source: Source) -> Iterator[str]:
        yield from (f"{source.path}:{line}: {message}" for line, message in sorted(set(check(source))))

    RULES[check.__name__] = findings
    return findings


def _forbidden(source: Source, names: list[str], *homes: str, why: str) -> Iterator[tuple[int, str]]:
    """Uses of some names, or of anything below them, in a file that is none of their places."""
    if source.path.startswith(homes):
        return
    for line, used in source.uses:
        for name in names:
            if used == name or used.startswith(name + "."):
                yield line, f"{name}: {why}"


@rule
def imports_go_down(source: Source) -> Iterator[tuple[int, str]]:
    """A module imports from lower floors, its own room and `errors`."""
    if source.room not in FLOORS:
        yield 1, f"the room {source.room!r} stands on no floor; give it one in {Path(__file__).name}"
        return
    for line, name in source.imports():
        if name.split(".")[0] != "moe_mk" or name.startswith(GROUND):
            continue
        room = name.split(".")[1] if "." in name else "__init__"
        if room not in FLOORS:
            yield line, f"{name}: comes through the front door, or from a room that stands on no floor"
        elif not (
            room in (source.room, "errors") or FLOORS[room] < FLOORS[source.room] or (source.room, room) in SIDEWAYS
        ):
            yield line, f"{source.room} (floor {FLOORS[source.room]}) imports {name} (floor {FLOORS[room]})"


@rule
def optional_libraries_stay_home(source: Source) -> Iterator[tuple[int, str]]:
    """Only what every installation has is imported outside three rooms; the lab also imports what `[lab]` installs."""
    if source.path.startswith(OPTIONAL_LIVES_IN):
        return
    everywhere = sys.stdlib_module_names | DEPENDENCIES | {"moe_mk"} | (LAB if source.room == "lab" else set())
    for line, name in source.imports():
        if name.split(".")[0] not in everywhere:
            yield line, f"{name} is optional and belongs in kernels/triton, external or integrations"


def _modules(requirements: list[str]) -> set[str]:
    names = {re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0] for line in requirements}
    return {{"PyYAML": "yaml"}.get(name, name.replace("-", "_")) for name in names}


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DEPENDENCIES = _modules(PROJECT["dependencies"])
LAB = _modules(PROJECT["optional-dependencies"]["lab"]) - {"matplotlib"}


@rule
def environment_is_read_in_one_file(source: Source) -> Iterator[tuple[int, str]]:
    """The library has settings, not environment variables."""
    home = "moe_mk/lab/cli/environment.py"
    yield from _forbidden(source, ENVIRONMENT, home, why=f"belongs in {home}")


@rule
def clock_is_read_in_one_file(source: Source) -> Iterator[tuple[int, str]]:
    """One clock, which tests can replace."""
    yield from _forbidden(source, CLOCKS, "moe_mk/trace/clock.py", why="belongs in moe_mk/trace/clock.py")


@rule
def threads_are_started_in_one_file(source: Source) -> Iterator[tuple[int, str]]:
    """Locks that Python code takes stay locked where a signal handler raises in it: callers use `moe_mk.jobs`."""
    others = ("comm/", "lab/testing/", "lab/cli/processes.py", "kernels/native/toolchain.py")
    yield from _forbidden(source, PYTHON_LOCKS, *(f"moe_mk/{each}" for each in others), why="use moe_mk.jobs")


@rule
def device_is_asked_in_one_file(source: Source) -> Iterator[tuple[int, str]]:
    """What the machine has is asked once and then is data."""
    yield from _forbidden(source, ACCELERATORS, "moe_mk/external/device.py", why="belongs in moe_mk/external/device.py")


@rule
def process_groups_are_given(source: Source) -> Iterator[tuple[int, str]]:
    """A host owns the world; only programs of ours and tests make one."""
    if source.path.startswith(("moe_mk/lab/cli/", "moe_mk/lab/testing/")):
        return
    named = [(line, name) for node in source.nodes for line, name in _identifiers(node)]
    for line, name in [*named, *((line, name.split(".")[-1]) for line, name in source.imports())]:
        if name in WORLD_MAKERS:
            yield line, f"{name}: a process group comes from the caller"


@rule
def nothing_is_unpickled(source: Source) -> Iterator[tuple[int, str]]:
    """A file that is read can never run code."""
    yield from _forbidden(source, PICKLES, why="reads code, not data")
    for call, name in source.calls:
        safe = {k.arg for k in call.keywords if isinstance(k.value, ast.Constant) and k.value.value is True}
        if name == "torch.load" and "weights_only" not in safe:
            yield call.lineno, "torch.load without weights_only=True: reads code, not data"
        for keyword in call.keywords:
            refused = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg == "allow_pickle" and not refused:
                yield call.lineno, f"{name}(allow_pickle=...): reads code, not data"


@rule
def allocations_name_dtype_and_device(source: Source) -> Iterator[tuple[int, str]]:
    """A host may have changed torch's defaults."""
    for call, name in source.calls:
        if re.fullmatch(r"torch\.([a-z]+\.)?[A-Za-z]*Tensor", name):
            yield call.lineno, f"{name}(...) follows torch's defaults; use torch.tensor or torch.empty"
        if name not in ALLOCATORS:
            continue
        missing = {"dtype", "device"} - {keyword.arg for keyword in call.keywords}
        if missing:
            yield call.lineno, f"{name}(...) does not name {' and '.join(sorted(missing, reverse=True))}"


CONTEXT = re.compile(r"@(contextlib\.)?contextmanager\b")
GOES_ON = re.compile(r"\byield\b(?!.*\n\s*return\b)")
ONLY_AFTER_SUCCESS = ("frame", "replacing", "partial_folder", "no_global_changes")
"""Contexts that grow memory, complete files or judge what a block did: nothing where it raised."""


@rule
def contexts_end_in_finally(source: Source) -> Iterator[tuple[int, str]]:
    """What a context manager does after its block, it does after any."""
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef) and CONTEXT.match(ast.unparse(node)):
            bodies = [getattr(each, "body", None) for each in ast.walk(node)]
            for one, after in chain.from_iterable(pairwise(body) for body in bodies if isinstance(body, list)):
                is_left_out = isinstance(after, ast.Return) or node.name in ONLY_AFTER_SUCCESS
                if GOES_ON.search(ast.unparse(one)) and not is_left_out:
                    yield after.lineno, "not done where the block raises: belongs in a finally"


WAITS = re.compile(
    r"\b_*(wait(_for)?|pause|sleep|poll|select|acquire|recv(_into)?|sched_yield|listen|join|communicate)\("
)
ENDLESS = re.compile(
    r"\.(wait|join|acquire|communicate|select)\((timeout=)?(None|True|float\('inf'\))?\)$"
    r"|\.wait_for\((?!.*(timeout|limit))|epoll\.poll\(\)|select\.select\((?!.*,.*,.*,)"
    r"|^fcntl\.(flock|lockf)\((?!.*LOCK_(NB|UN))|subprocess\.(run|call|check_call|check_output)\b(?!.*timeout=)"
    r"|^dist\.(barrier|all_|broadcast|gather|scatter|reduce|send|recv)\w*\((?!.*async_op=True)"
)
"""Calls that wait without a limit."""
MAY_BE_ENDLESS = re.compile(r"wait|join|acquire|communicate|select|poll|lock|process|dist\.|result")
CLOCK = re.compile(r"\b_?(now|clock)\(\)|\b(timeout_s|looks)\b|\.pause\(")
"""Ends of a loop that waits: a clock, a number of looks, or `Waiting.pause`, which raises after the timeout."""
LOCK = re.compile(r" = .*\b(R?Lock|Condition)\(")
WITHOUT_DEADLINE = {
    "comm/connections.py: while (connections := of()) is not None:": "the thread of a group ends with it",
    "comm/distributed.py: work.wait()": "NCCL queues it on the stream, and the watchdog of the group has a limit",
    "comm/threads.py: return [done.result()": "threads of the caller; each call has the timeout of its group",
    "jobs.py: self._lock.acquire()": "no other thread knows this lock yet",
    "jobs.py: while self._jobs or self._bell.wait(self._linger_s)": "the thread of jobs, which ends when it is idle",
    "jobs.py: job.wait(float(": "running jobs use memory and files that the caller frees next",
    "jobs.py: while not all(job.is_over for job in jobs):": "the same",
    "jobs.py: _ = job.is_over or job.wait(float(": "the same",
    "kernels/native/build.py: while done < len(commands):": "each wait has QUIET_S; a compiler that writes goes on",
}
"""Files and beginnings of lines that may wait without a deadline, and why."""


@rule
def waits_have_a_deadline(source: Source) -> Iterator[tuple[int, str]]:
    """No thread waits for ever: calls that wait have a limit, loops a clock, and locks are held over no wait."""
    if source.room == "lab":
        return
    lines, where = source.text.splitlines(), source.path.removeprefix("moe_mk/")
    made = [line.partition(" = ")[0] for line in lines if LOCK.search(line)]
    locks = [f"{name}." for line in made for name in re.findall(r"(\w+)(?:: \w+)?(?:,|$)", line)]
    for node in source.nodes:
        found = ""
        if isinstance(node, ast.Call) and MAY_BE_ENDLESS.search(lines[node.lineno - 1]):
            text = ast.unparse(node)
            is_future = text.endswith(".result()") and "concurrent.futures" in source.text
            found = "a call without a limit" * bool(is_future or ENDLESS.search(text))
        elif isinstance(node, ast.While | ast.With | ast.FunctionDef):
            text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            found = _blocks(node, text, locks, "import socket" in source.text)
        if found and not f"{where}: {lines[node.lineno - 1].strip()}".startswith(tuple(WITHOUT_DEADLINE)):
            yield node.lineno, f"{found}: give it a deadline"  # type: ignore[attr-defined]


def _blocks(node: ast.While | ast.With | ast.FunctionDef, text: str, locks: list[str], has_sockets: bool) -> str:
    """How a part of a file may wait for ever, or ""."""
    if isinstance(node, ast.While):
        looks = WAITS.search(text) or re.search(r"\bload\(", text) or isinstance(node.body[0], ast.Pass | ast.Continue)
        return "a loop that waits and reads no clock" if looks and not CLOCK.search(text) else ""
    if isinstance(node, ast.With):
        held = tuple(name for name in locks for item in node.items if f"{ast.unparse(item)}.".endswith(name))
        waits = [each for each in WAITS.finditer(text) if not text[: each.start()].endswith(held)]
        return "a wait with a lock, for which others wait without a limit" if held and waits else ""
    opens = re.search(r"socket\.(socket|create_connection)\(|\.accept\(\)", text) if has_sockets else None
    uses = opens and re.search(r"\.(recv|send|accept|listen|connect)", text)
    return "a socket that blocks" if uses and not re.search(r"\.setblocking\(False|timeout=", text) else ""


def suffixes(source: Source) -> Iterator[tuple[int, str, str]]:
    """Line, identifier and axis letters of every name that ends like `x_TH`."""
    for node in source.nodes:
        for line, name in _identifiers(node):
            if found := re.fullmatch(r"_*[a-z]\w*_([0-9]*[A-Z][A-Z0-9]*)", name):
                yield line, name, re.sub("[0-9]", "", found[1])


def _identifiers(node: ast.AST) -> list[tuple[int, str]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [(node.lineno, node.name)]
    if isinstance(node, ast.Name):
        return [(node.lineno, node.id)]
    if isinstance(node, ast.Attribute):
        return [(node.lineno, node.attr)]
    if isinstance(node, ast.arg | ast.keyword) and node.arg:
        return [(node.lineno, node.arg)]
    return []
