"""Descriptors and memory that forked children release, so that peers detect the end of this rank.

A connection ends when its last descriptor is closed. A helper that a rank forks (`os.fork`, multiprocessing with
"fork") inherits them all, so that the peers of a rank that is killed would see its connections open as long as the
helper lives. Spawned processes inherit none: every descriptor is closed at exec.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

FORKED = (
    "this process was forked after the windows were opened, and they belong to its parent; start helpers with "
    'multiprocessing.get_context("spawn"), or fork before the layer is built, or build a layer of its own in the child'
)

_ACTIONS: MutableMapping[object, Callable[[Any], object]] = WeakKeyDictionary()


def in_child(owner: T, action: Callable[[T], object]) -> T:
    """Run action(owner) in every child that this process forks while `owner` lives; returns the owner.

    The child has none of the other threads, and locks they held stay locked: an action takes none. It must not refer
    to the owner otherwise than by its argument. One action for each owner: a later one replaces it.
    """
    _ACTIONS[owner] = action
    return owner


def _act() -> None:
    for owner, action in list(_ACTIONS.items()):
        with suppress(OSError):  # a descriptor that cannot be closed does not keep the others open
            action(owner)
    _ACTIONS.clear()


os.register_at_fork(after_in_child=_act)
