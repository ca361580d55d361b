"""The tag of a wheel, as auditwheel words it."""

import pytest

from tools.wheel import is_allowed

SHOWN = """
moe_mk-0.1.0-py3-none-manylinux_2_28_x86_64.whl is consistent with
the following platform tag: "{}".

The wheel references external versioned symbols in these
system-provided shared libraries: libc.so.6 with versions {{'GLIBC_2.2.5'}}
"""


@pytest.mark.parametrize(
    ("tag", "allowed"),
    [("manylinux_2_28_x86_64", True), ("manylinux_2_5_x86_64", True), ("manylinux_2_29_x86_64", False),
     ("manylinux_2_28_aarch64", False), ("linux_x86_64", False)],
)  # fmt: skip
def test_a_wheel_needs_the_glibc_of_its_tag_or_an_older_one(tag: str, allowed: bool) -> None:
    assert is_allowed(SHOWN.format(tag), "x86_64") is allowed
    assert is_allowed(SHOWN.replace("tag: ", "tag:\n").format(tag), "x86_64") is allowed
