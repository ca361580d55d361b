"""Names to plugins: contracts checked, typos answered, nothing overwritten, broken wheels reported by name."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import ClassVar

import pytest

from moe_mk.errors import ConfigError, PluginWarning
from moe_mk.registry import Records, Registry


class Base(ABC):
    traits: ClassVar[str]

    @abstractmethod
    def run(self, tokens: int, weights: int) -> int: ...

    @classmethod
    @abstractmethod
    def volume(cls, problem: int) -> int: ...


class NoTraits(Base):
    def run(self, tokens: int, weights: int) -> int:
        return tokens

    @classmethod
    def volume(cls, problem: int) -> int:
        return problem


class Good(NoTraits):
    traits = "good"


class OtherParameters(Good):
    def run(self, x: int, weights: int, extra: int = 0) -> int:  # type: ignore[override]
        return x


class NoVolume(Base):
    traits = "bad"

    def run(self, tokens: int, weights: int) -> int:
        return tokens


class NotAMethod(Good):
    run = None  # type: ignore[assignment]


def registry() -> Registry[type[Base]]:
    made: Registry[type[Base]] = Registry("transport", Base)
    made.register("all_gather")(Good)
    made.register("all_to_all", origin="somewhere")(Good)
    return made


def test_entries_are_found_by_name_in_order_of_registration() -> None:
    known = registry()
    assert known.register("third")(Good) is known["third"] is known["all_gather"] is Good
    assert list(known) == ["all_gather", "all_to_all", "third"]
    assert known.items() == [(name, Good) for name in known]
    assert "all_gather" in known and "nothing" not in known and 3 not in known
    assert known.origin("all_gather") == __name__ and known.origin("all_to_all") == "somewhere"


def test_a_typo_is_answered() -> None:
    with pytest.raises(ConfigError, match=r"no transport is called 'all_gater'; did you mean 'all_gather'\?"):
        registry()["all_gater"]
    with pytest.raises(ConfigError, match=r"no transport is called 'xyz' \(known: all_gather, all_to_all\)"):
        registry()["xyz"]


def test_a_built_in_entry_is_listed_without_an_import_and_its_name_is_taken() -> None:
    known = registry()
    before = list(known)
    known.builtin({"moe_mk.no_such_module": "later last"})
    assert list(known) == [*before, "later", "last"] and "later" in known
    assert known.origin("later") == "moe_mk.no_such_module" and known["all_gather"] is Good
    with pytest.raises(ConfigError, match=rf"'last' is registered twice: by moe_mk.no_such_module and by {__name__}"):
        known.register("last")(Good)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        known["later"]


def test_a_second_registration_names_both_modules() -> None:
    known = registry()
    with pytest.raises(ConfigError, match=rf"'all_gather' is registered twice: by {__name__} and by other.wheel"):
        known.register("all_gather", origin="other.wheel")(Good)
    assert known["all_gather"] is Good


@pytest.mark.parametrize(
    "entry, problem",
    [
        (OtherParameters, r"run\(self, x, weights, extra\) should be run\(self, tokens, weights\)"),
        (NoVolume, r"volume\(\) is not implemented"),
        (NoTraits, "the class attribute `traits` is missing"),
        (NotAMethod, "run is a NoneType, not a method"),
        (int, "<class 'int'> is not a subclass of Base"),
        (Good(), ".*Good object at .* is not a subclass of Base"),
    ],
)
def test_a_class_that_breaks_the_contract_is_refused(entry: type[Base], problem: str) -> None:
    known = registry()
    with pytest.raises(ConfigError, match=f"transport 'new' of here breaks the contract of Base: {problem}"):
        known.register("new", origin="here")(entry)
    assert "new" not in known


def test_all_problems_are_reported_at_once() -> None:
    class Hopeless(Base):
        def run(self) -> int:  # type: ignore[override]
            return 0

    with pytest.raises(ConfigError) as caught:
        registry().register("new")(Hopeless)  # type: ignore[type-abstract]
    for problem in ("volume() is not implemented", "`traits` is missing", "run(self) should be"):
        assert problem in str(caught.value)


@dataclass(frozen=True)
class FakeDistribution:
    name: str


@dataclass(frozen=True)
class FakeEntryPoint:
    name: str
    load: Callable[[], object]
    dist: FakeDistribution | None = FakeDistribution("my-wheel")
    value: str = "my_wheel.transport:Mine"


def raising(problem: BaseException) -> Callable[[], object]:
    def load() -> object:
        raise problem

    return load


WHEEL = "my-wheel (my_wheel.transport:Mine)"
fail = raising(OSError("libnothing.so: cannot open shared object file"))


def discovering(monkeypatch: pytest.MonkeyPatch, *points: FakeEntryPoint) -> Registry[type[Base]]:
    asked: list[str] = []

    def entry_points(group: str) -> tuple[FakeEntryPoint, ...]:
        asked.append(group)
        assert asked == ["moe_mk.transports"]  # once, for the group of this registry
        return points

    monkeypatch.setattr("moe_mk.registry.entry_points", entry_points)
    made: Registry[type[Base]] = Registry("transport", Base, group="moe_mk.transports")
    made.register("all_gather")(Good)
    return made


@pytest.mark.row("N21")
def test_wheels_add_entries_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Good):
        pass

    known = discovering(monkeypatch, FakeEntryPoint("mine", lambda: Mine), FakeEntryPoint("lost", lambda: Good, None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(known) == ["all_gather", "lost", "mine"] and known["mine"] is Mine
    assert known.origin("mine") == WHEEL
    assert known.origin("lost") == "? (my_wheel.transport:Mine)"


def test_a_second_thread_waits_until_all_entry_points_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, looked = Event(), Event()

    def slow() -> type[Good]:
        begun.set()
        looked.wait(0.2)  # the other thread looks the name up meanwhile
        return type("Mine", (Good,), {})

    known = discovering(monkeypatch, FakeEntryPoint("mine", slow))

    def second() -> str:
        assert begun.wait(5.0)
        try:
            return known["mine"].__name__
        finally:
            looked.set()

    with ThreadPoolExecutor(2) as pool:
        assert [each.result(5.0) for each in (pool.submit(list, known), pool.submit(second))] == [
            ["all_gather", "mine"],
            "Mine",
        ]


def test_records_of_wheels_are_read_when_a_name_is_not_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        FakeEntryPoint(name, load) for name, load in (("ours", int), ("bad", str), ("lost", fail), ("two", lambda: 2))
    ]
    asked: list[str] = []
    monkeypatch.setattr("moe_mk.registry.entry_points", lambda group: asked.append(group) or points)
    records = Records(int, "moe_mk.numbers", {"ours": 1})
    assert records["ours"] == 1 and not asked
    with pytest.warns(PluginWarning, match=r"moe_mk\.numbers '(ours|bad|lost)' of my-wheel .* skipped") as warned:
        assert dict(records) == {"ours": 1, "two": 2} and len(records) == 2
    assert len(warned) == 3 and asked == ["moe_mk.numbers"] and "three" not in records


def test_of_two_wheels_with_one_name_the_same_one_serves_on_every_host(monkeypatch: pytest.MonkeyPatch) -> None:
    two = [FakeEntryPoint("mine", lambda: Good, FakeDistribution(name)) for name in ("b", "a")]
    for points in (two, two[::-1]):
        known = discovering(monkeypatch, *points)
        with pytest.warns(PluginWarning, match=r"'mine' of b \(.*'mine' is registered twice: by a \(.* and by b \("):
            assert known.origin(list(known)[1]).startswith("a (")


@pytest.mark.row("N21")
def test_a_broken_wheel_is_skipped_and_reported_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    known = discovering(monkeypatch, FakeEntryPoint("broken", fail), FakeEntryPoint("mine", lambda: Good))
    with pytest.warns(PluginWarning, match=r"transport plugin 'broken' of my-wheel \(.*\) skipped: OSError: lib"):
        assert list(known) == ["all_gather", "mine"]
    assert known.broken == {"broken": f"{WHEEL}: OSError: libnothing.so: cannot open shared object file"}
    with pytest.raises(ConfigError, match=r"'broken' is installed but could not be loaded: my-wheel \(.*\): OSError"):
        known["broken"]
    assert "broken" not in known


def trapped(problem: BaseException) -> Callable[[], object]:
    """Loads a class with an attribute that raises when it is read."""
    trap = type("Trap", (type(Good),), {"traits": property(lambda cls: raising(problem)())})
    return lambda: trap("Trapped", (Good,), {})


class Unspeakable(BaseException):
    """Neither an Exception nor an interrupt, with a text that cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "load, reason",
    [
        (raising(SystemExit(3)), "SystemExit: 3"),
        (raising(Unspeakable()), r"Unspeakable \(its text raises RuntimeError\)"),
        (raising(GeneratorExit()), "GeneratorExit: "),
        (raising(RecursionError("too deep")), "RecursionError: too deep"),
        (trapped(SystemExit("bye")), "SystemExit: bye"),
        (
            trapped(RuntimeError("no driver")),
            r"breaks the contract of Base: its attributes cannot be read: RuntimeError: no driver",
        ),
    ],
)
def test_a_wheel_that_ends_its_process_is_skipped_too(
    monkeypatch: pytest.MonkeyPatch, load: Callable[[], object], reason: str
) -> None:
    known = discovering(monkeypatch, FakeEntryPoint("broken", load), FakeEntryPoint("mine", lambda: Good))
    with pytest.warns(PluginWarning, match=rf"transport plugin 'broken' of my-wheel \(.*\) skipped: .*{reason}"):
        assert list(known) == ["all_gather", "mine"]
    assert list(known.broken) == ["broken"]


def test_an_interrupt_passes_and_the_rest_is_loaded_later(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []

    def interrupted() -> object:
        loads.append("second")
        if len(loads) == 1:
            raise KeyboardInterrupt
        return Good

    points = [FakeEntryPoint("first", lambda: Good), FakeEntryPoint("second", interrupted)]
    known = discovering(monkeypatch, *points, FakeEntryPoint("third", fail))
    with pytest.raises(KeyboardInterrupt):
        list(known)
    assert known.broken == {}
    monkeypatch.setattr("moe_mk.registry.entry_points", lambda group: tuple(points))
    assert list(known) == ["all_gather", "first", "second"]


def test_warnings_that_are_errors_do_not_lose_the_other_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    points = (FakeEntryPoint("broken", fail), FakeEntryPoint("mine", lambda: Good))
    monkeypatch.setattr("moe_mk.registry.entry_points", lambda group: points)
    known: Registry[type[Base]] = Registry("transport", Base, group="moe_mk.transports")
    with warnings.catch_warnings():
        warnings.simplefilter("error", PluginWarning)
        with pytest.raises(PluginWarning, match="'broken'"):
            list(known)
        assert list(known) == ["mine"]


@pytest.mark.parametrize(
    "name, load, reason",
    [
        ("all_gather", lambda: Good, f"registered twice: by {__name__} and by my-wheel"),
        ("mine", lambda: NoVolume, r"breaks the contract of Base: volume\(\) is not implemented"),
    ],
)
def test_a_wheel_that_breaks_the_rules_leaves_ours_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, load: Callable[[], object], reason: str
) -> None:
    known = discovering(monkeypatch, FakeEntryPoint(name, load))
    with pytest.warns(PluginWarning, match=reason):
        assert known.items() == [("all_gather", Good)]


def test_nothing_is_loaded_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    known = discovering(monkeypatch, FakeEntryPoint("mine", lambda: loaded.append("mine") or Good))  # type: ignore[func-returns-value]
    assert not loaded and "mine" in known and "mine" in known and loaded == ["mine"]
