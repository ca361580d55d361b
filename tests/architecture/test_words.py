"""The project's former private words do not come back: each has a standard term, and the places left may only shrink.
`python tests/architecture/test_words.py` writes `words_left.json`, the places that remain, and refuses to add any."""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT = Path(__file__).with_name("words_left.json")
SCANNED = ("moe_mk", "contrib", "docs", "tests", "tools", "examples", "README.md")
SUFFIXES = {".py", ".h", ".cpp", ".md", ".yaml"}
NOT_SCANNED = {"tests/architecture/test_words.py", "docs/capabilities.md"}  # the page is written from tests/rows.yaml


@dataclass(frozen=True)
class Word:
    """What must not be written, and what is written instead."""

    pattern: str
    instead: str
    without: tuple[str, ...] = ()
    """Paths in which the word has its ordinary meaning."""


NAME = r"(?! [a-z])"
"""An identifier, not the first word of a sentence."""
WORDS = {
    "WayHome": Word(r"\bWayHome\w*", "DispatchHandle"),
    "Half": Word(rf"\bHalf\b{NAME}", "AsyncResult in runner, ServingState in layer"),
    "lane": Word(
        r"\b_?[Ll]anes?\b",
        "BufferSlot, Arena or Worker",
        ("moe_mk/kernels/", "contrib/moe_mk_contrib/moe_mk_contrib/gluon/"),
    ),  # lanes of SIMD and warps
    "carrier": Word(r"\b_?[Cc]arriers?\b", "comm thread"),
    "crew": Word(r"\b_?[Cc]rews?\b", "workers"),
    "beside": Word(r"\bbeside\b", "with, next to, in addition to"),
    "Beside": Word(rf"\bBESIDE\b|\bBeside\b{NAME}", "fuse_shared_experts, FusedParts"),
    "with_gate": Word(r"\bwith_gate\b", "fuse_layer"),
    "Whole": Word(rf"\bWhole\w*{NAME}|\bwhole_of\b", "FusedForward, build_fused_forward"),
    "relayout_telling": Word(r"\brelayout_telling\b", "relayout(weights, on_progress=...)"),
    "EvenNumbers": Word(r"\bEvenNumbers\b|\beven_numbers\b", "UniformExpertIds"),
    "told_once": Word(r"\btold_once\b", "group_refusals"),
    "PassedOver": Word(r"\bPassedOver\b", "RejectedFormat"),
    "Tried": Word(rf"\bTried\b{NAME}", "Attempt"),
    "Form": Word(rf"\bForm\b{NAME}", "RejectedFormat in oracle, KernelFormat in triton"),
    "RoomyWeights": Word(r"\bRoomyWeights\b", "PaddedStack"),
    "FormedWeights": Word(r"\bFormedWeights\b", "PackedWeights"),
    ".lies": Word(r"\.lies\b", ".format"),
    "_dealt": Word(r"\b_dealt\b", "_interleaved"),
    "Desk": Word(r"\bDesks?\b", "ThreadScratch"),
    "fold.h": Word(r"\bfold\.h\b", "apply_scales.h"),
    "Lease": Word(r"\bLease\b", "ThreadPoolLease"),
    "Team": Word(r"\bTeam\b", "ThreadPool"),
    "land": Word(r"\bland(s|ed|ing)?\b", "wait, arrive, complete"),
    "give_up": Word(r"\bgive_up\b", "cancel"),
    "hop": Word(r"\bhops?\b", "yield point"),
    "journey": Word(r"\bjourneys?\b", "dispatch, combine"),
    "way out": Word(r"\bway out\b", "dispatch; of an error: remedy"),
    "way home": Word(r"\bways? home\b|\bhomewards?\b", "combine"),
    "home": Word(r"(?<!Path\.)\bhome\b(?! director)", "source rank"),
    "guest": Word(r"\bguests?\b", "received row"),
    "visit": Word(r"\bvisit(s|ed|ing)?\b", "destination count, destination"),
    "told": Word(r"\b(told|tells?|says|said)\b", "reports, lists, prints, returns"),
    "by name alone": Word(r"\bby name alone\b", "only when pinned"),
    "whosesoever": Word(r"\bwhosesoever\b", "for any layer"),
    "nobody": Word(r"\bnobody('s)?\b", "unassigned, no rank"),
    "in any company": Word(r"\bin any company\b", "batch-invariant"),
    "cannot be meant": Word(r"\bcannot be meant\b", "out of range (0 <= rank < 4)"),
    "lies": Word(r"(?<!\.)\blies\b|\blie (in|on|at|below|outside|inside|between|one)\b", "is, is stored, is located"),
}


def files(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Path and text of every file that is read."""
    for top in SCANNED:
        at = root / top
        for path in [at] if at.is_file() else sorted(at.rglob("*")):
            where = path.relative_to(root).as_posix()
            if path.suffix in SUFFIXES and path.is_file() and where not in NOT_SCANNED:
                yield where, path.read_text(encoding="utf-8")


def found_in(where: str, text: str) -> Counter[str]:
    """How often each word stands in a file."""
    counts = {
        name: len(re.findall(word.pattern, text))
        for name, word in WORDS.items()
        if not where.startswith(word.without or ("\n",)) and any(part in text for part in _parts(word.pattern))
    }
    return Counter({name: count for name, count in counts.items() if count})


@cache
def _parts(pattern: str) -> tuple[str, ...]:
    """Texts of which any match has one: many times quicker to look for than the pattern."""
    certain = re.sub(r"\\.|\(\?[^)]*\)|\[[^]]*\]|.[?*]", "\n", pattern)
    return tuple(re.findall(r"[A-Za-z_]{3,}", certain))


def found(root: Path = ROOT) -> dict[str, dict[str, int]]:
    """word -> file -> count."""
    places: dict[str, dict[str, int]] = {}
    for where, text in files(root):
        for name, count in found_in(where, text).items():
            places.setdefault(name, {})[where] = count
    return places


Places = Mapping[str, Mapping[str, int]]


def added(now: Places, left: Places) -> list[str]:
    """Words that stand more often in a file than the list allows, one line a file."""
    return [
        f"{where}: {name!r} {count} times, {left.get(name, {}).get(where, 0)} allowed; write {WORDS[name].instead}"
        for name, counts in now.items()
        for where, count in counts.items()
        if count > left.get(name, {}).get(where, 0)
    ]


def read_left() -> dict[str, dict[str, int]]:
    """The places that remain."""
    read: dict[str, dict[str, int]] = json.loads(LEFT.read_text(encoding="utf-8"))
    return read


def test_private_words_do_not_come_back() -> None:
    problems = added(found(), read_left())
    assert not problems, "\n".join(["", *problems, "where files moved: python tests/architecture/test_words.py"])


def test_the_list_of_places_names_words_of_the_table() -> None:
    assert set(read_left()) <= set(WORDS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("class Half(Generic[T]): ...", {"Half": 1}),
        ("Half the scale would clip.", {}),
        ("self._lanes = [Lane()]", {"lane": 2}),
        ("The carrier's crew", {"carrier": 1, "crew": 1}),
        ("experts.beside(shared) and BESIDE", {"beside": 1, "Beside": 1}),
        ("a WholeLayer; Whole models", {"Whole": 1}),
        ("rows land here; the island", {"land": 1}),
        ("in the home directory; Path.home()", {}),
        ("rows on their way home to their home rank", {"way home": 1, "home": 2}),
        ("it says what it was told", {"told": 2}),
        ("weights.lies; what lies in memory", {".lies": 1, "lies": 1}),
        ("essays tell_me unsaid visitor shop", {}),
    ],
)
def test_words_are_found_and_ordinary_ones_are_not(text: str, words: dict[str, int]) -> None:
    assert found_in("moe_mk/a.py", text) == words


def test_lanes_of_processors_keep_their_name() -> None:
    assert found_in("moe_mk/kernels/csrc/a.h", "int lane = 0;") == {}


def test_a_new_place_is_reported_and_fewer_are_not() -> None:
    left = {"hop": {"a.py": 2}}
    assert added({"hop": {"a.py": 1}}, left) == []
    (line,) = added({"hop": {"a.py": 2, "b.py": 1}}, left)
    assert line == "b.py: 'hop' 1 times, 0 allowed; write yield point"


def main(*, anew: bool) -> int:
    """Write the list; returns the exit code. `anew`: also where a word stands more often in all than the list says."""
    now, left = found(), read_left() if LEFT.exists() else {}
    more = [name for name in now if sum(now[name].values()) > sum(left.get(name, {}).values())]
    if more and not anew:
        print(f"more often than {LEFT.name} allows: {', '.join(more)}", *added(now, left), sep="\n", file=sys.stderr)
        return 1
    LEFT.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for name in sorted(now, key=lambda name: -sum(now[name].values())):
        print(f"{sum(now[name].values()):5} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(anew="--anew" in sys.argv))
