"""Bytes and times of exchanges against what DeepEP and UCCL-EP have published, and what the model cannot explain."""

from dataclasses import replace
from pathlib import Path

import pytest

from moe_mk.errors import ConfigError
from moe_mk.lab.plan.exchange import Exchange
from moe_mk.lab.plan.links import Direction, LinkProfile, Measured, link_profile, links_of_device, shipped_links
from moe_mk.lab.plan.predict import (
    DIRECTIONS,
    Line,
    _constants,
    exchange_of,
    held_out,
    left_out,
    points_of,
    predict,
    published_us,
)

# Ranks, then GB/s and microseconds of dispatch and of combine: the tables of UCCL-EP, 4096 tokens.
UCCL = {
    "p5en_efa": [(8, 320, 500, 319, 973), (16, 50, 1196, 18, 6379), (24, 53, 1633, 26, 6365), (32, 54, 2022, 43, 4899)],
    "p6_efa": [(8, 280, 571, 426, 727), (16, 53, 1141, 60, 1965), (24, 53, 1637, 59, 2887), (32, 53, 2072, 57, 3724)],
}
# Ranks, then microseconds and GB/s of dispatch and of combine: the low-latency table of DeepEP V1, 128 tokens.
LATENCY = [
    (8, 77, 98, 114, 127), (16, 118, 63, 195, 74), (32, 155, 48, 273, 53), (64, 173, 43, 314, 46),
    (128, 192, 39, 369, 39), (256, 194, 39, 360, 40),
]  # fmt: skip


@pytest.mark.row(52)
def test_published_throughput_tables_are_the_bytes_of_the_model() -> None:
    # GB/s times microseconds are the bytes that were counted. Rounded to two digits, 26 GB/s may be off by 2 %.
    errors = {}
    for name, table in UCCL.items():
        for ranks, dispatch_gbs, dispatch_us, combine_gbs, combine_us in table:
            exchange = exchange_of(link_profile(name), Measured(mode="throughput", ranks=ranks))
            implied = {"dispatch": dispatch_gbs * dispatch_us * 1e3, "combine": combine_gbs * combine_us * 1e3}
            for direction in ("dispatch", "combine"):
                model = exchange.num_bytes("throughput", direction)
                errors[name, ranks, direction] = abs(model - implied[direction]) / implied[direction]
    assert len(errors) == 16
    assert errors.pop(("p5en_efa", 24, "combine")) < 0.026
    assert max(errors.values()) < 0.02


@pytest.mark.row(52)
@pytest.mark.parametrize(
    "ranks,dispatch_us,combine_us", [(8, 1050, 1972), (16, 1403, 2722), (32, 1889, 3728), (64, 2364, 4677)]
)
def test_deepep_rates_give_the_times_of_their_bytes(ranks: int, dispatch_us: float, combine_us: float) -> None:
    # 153, 43, 58, 51 GB/s out and 158, 43, 57, 50 back. The times come from drawing the benchmark's own routings.
    profile = link_profile("h800_cx7")
    row = profile.measured_at("throughput", ranks)
    exchange = exchange_of(profile, row)
    assert exchange.num_bytes("throughput", "dispatch") / row.dispatch_gbs / 1e3 == pytest.approx(
        dispatch_us, rel=0.005
    )
    assert exchange.num_bytes("throughput", "combine") / row.combine_gbs / 1e3 == pytest.approx(combine_us, rel=0.005)


@pytest.mark.row(53)
@pytest.mark.parametrize("ranks,dispatch_us,dispatch_gbs,combine_us,combine_gbs", LATENCY)
def test_published_latency_table_is_the_bytes_of_the_model(
    ranks: int, dispatch_us: float, dispatch_gbs: float, combine_us: float, combine_gbs: float
) -> None:
    # 1014 of 1024 messages of 7168 + 224 + 16 B are 7,511,712 B; 1014 bf16 rows are 14,536,704 B.
    exchange = exchange_of(link_profile("h800_cx7"), Measured(mode="latency", ranks=ranks))
    assert exchange.num_bytes("latency", "dispatch") == 7_511_712
    assert exchange.num_bytes("latency", "combine") == 14_536_704
    assert abs(7_511_712 / dispatch_us / 1e3 - dispatch_gbs) < 1
    assert abs(14_536_704 / combine_us / 1e3 - combine_gbs) < 1


@pytest.mark.row(53)
@pytest.mark.parametrize(
    "direction,alpha,gbs,worst,inner,end",
    [("dispatch", 34.6, 45.94, 0.027, 0.04, -0.09), ("combine", 5.7, 39.53, 0.05, 0.08, -0.18)],
)
def test_latency_is_a_line_in_what_crosses_nodes(
    direction: Direction, alpha: float, gbs: float, worst: float, inner: float, end: float
) -> None:
    points = points_of(link_profile("h800_cx7"), "latency", direction)
    line = Line.fit(points)
    assert line.alpha_us == pytest.approx(alpha, abs=0.1) and line.gbs == pytest.approx(gbs, abs=0.02)
    assert max(map(abs, line.errors(points))) < worst + 0.001
    # Left out, a row in the middle is met, the first one is not: an extrapolation, and the answer states so.
    alone = left_out(points)
    assert max(map(abs, alone[1:])) < inner + 0.005
    assert alone[0] == pytest.approx(end, abs=0.01)


@pytest.mark.row(163)
def test_efa_dispatch_is_predicted_and_one_combine_is_not() -> None:
    profile = link_profile("p5en_efa")
    for ranks, _, us, _, _ in UCCL["p5en_efa"]:
        found = predict(
            profile, exchange_of(profile, Measured(mode="throughput", ranks=ranks)), "throughput", "dispatch"
        )
        assert found.us == pytest.approx(us, rel=0.01)
        # "about 50 GB/s between nodes, more than 300 inside one", as published
        assert found.logical_gbs > 300 if ranks == 8 else 49 < found.logical_gbs < 55
    combined = predict(profile, exchange_of(profile, Measured(mode="throughput", ranks=16)), "throughput", "combine")
    assert "do not grow with the bytes" in combined.basis and combined.us < 6379 / 4


@pytest.mark.row(164)
@pytest.mark.parametrize("name", ["mi300x_cx7", "mi300x_thor2", "mi355x_pollara"])
def test_profiles_of_other_vendors_load_and_predict(name: str) -> None:
    profile = link_profile(name)
    for row in profile.rows("throughput"):
        exchange = exchange_of(profile, row)
        for direction in ("dispatch", "combine"):
            published = exchange.num_bytes("throughput", direction) / row.gbs(direction) / 1e3
            assert predict(profile, exchange, "throughput", direction).us == pytest.approx(published, rel=0.03)
    far = [predict(profile, Exchange(4096, ranks), "throughput", "dispatch").us for ranks in (16, 32, 64, 128)]
    assert far == sorted(far) and len(set(far)) > 1


def test_a_prediction_states_its_error_on_rows_that_were_not_fitted() -> None:
    profile = link_profile("h800_cx7")
    found = predict(profile, Exchange(128, 64, nodes_kept=None), "latency", "dispatch")
    worst = max(map(abs, left_out(points_of(profile, "latency", "dispatch"))))
    assert f"within {100 * worst:.1f} % of each row that is left out" in found.basis
    wide = predict(profile, Exchange(128, 64, nodes_kept=None, wire="bf16"), "latency", "dispatch")
    assert wide.us > 1.5 * found.us, "twice the bytes over the same line"


def test_a_line_by_hand() -> None:
    line = Line.fit([(1e6, 30.0), (3e6, 70.0)])  # 2 MB take 40 us: 50 GB/s, and 10 us before
    assert (line.alpha_us, line.gbs) == (pytest.approx(10.0), pytest.approx(50.0))
    with pytest.raises(ConfigError, match="two different amounts of bytes, got 1"):
        Line.fit([(1e6, 30.0), (1e6, 31.0)])
    with pytest.raises(ConfigError, match="do not grow"):
        Line.fit([(1e6, 30.0), (2e6, 20.0)])


def test_without_anything_published_links_give_the_time() -> None:
    bare = LinkProfile(name="x", about="x", ranks_per_node=8, intra_gbs=100, inter_gbs=10)
    inside = predict(bare, Exchange(100, 8), "latency", "combine")
    assert inside.us == pytest.approx(100 * 8 * 14336 / 100e3) and inside.remote_bytes == 0
    across = predict(bare, Exchange(100, 16), "latency", "combine")
    assert across.us == pytest.approx(100 * 8 * 14336 * (0.5 / 10e3 + 0.5 / 100e3))
    assert "rates of the links" in across.basis
    bases = [predict(link_profile("p5en_efa"), Exchange(4096, n), "throughput", "combine").basis for n in (4, 8)]
    assert ["published" in basis for basis in bases] == [False, True], "of as many ranks"


def test_unknown_names_and_rows_are_reported() -> None:
    with pytest.raises(ConfigError, match="h800_cx7"):
        link_profile("h800_cx")
    with pytest.raises(ConfigError, match="nothing is published of latency kernels on 12 ranks; rows: 8, 16"):
        link_profile("h800_cx7").measured_at("latency", 12)
    assert {"h800_cx7", "mi300x_cx7", "p5en_efa", "ascend_910"} <= set(shipped_links())


UNFITTED = {
    # Values of each table, and how many of them are met within 20 %.
    "h100_nccl_ep": (8, 8), "sm90_deepep_v2": (4, 4), "b200_efa_uccl": (6, 6), "b200_efa_deepep_v1": (6, 6),
    "b200_hybrid_ep": (3, 3), "mi300x_cx7_bf16": (4, 4), "gb200_hybrid_ep": (15, 13), "h100_hybrid_ep": (9, 7),
    "b200_efa_deepep_v2": (6, 4), "mi300x_cx7": (14, 11), "b200_deepep_v1": (3, 2), "sm90_deepep_prefill": (8, 3),
    "sm90_pplx_prefill": (8, 6),
}  # fmt: skip


@pytest.mark.row(163, "N7")
@pytest.mark.parametrize("name", UNFITTED)
def test_tables_that_no_constant_was_fitted_to_are_predicted(name: str) -> None:
    profile = link_profile(name)
    assert not any(row.fits for row in profile.measured)
    found = [each for each in held_out() if each.profile.name == name]
    published = [each for row in profile.measured for each in DIRECTIONS if published_us(profile, row, each)]
    assert len(found) == len(published)
    assert (len(found), sum(abs(each.error) <= 0.2 for each in found)) == UNFITTED[name]
    assert profile.source.startswith("https://")
    if UNFITTED[name][0] > UNFITTED[name][1]:
        assert profile.misses, "values that are missed have a reason"


def test_every_table_without_fitted_rows_is_counted() -> None:
    tables = [link_profile(name) for name in shipped_links()]
    whole = [p.name for p in tables if p.measured and p.near and p.far and not any(row.fits for row in p.measured)]
    assert sorted(whole) == sorted(UNFITTED)


def test_a_held_out_value_by_hand() -> None:
    # NCCL EP, 32 ranks of four nodes, bf16: 1024 messages of 14,352 B, three quarters of them to other nodes. The line
    # of DeepEP's latency table is 34.56 us + 11.022 MB at 45.94 GB/s = 274.5 us; 14.7 MB at 53.6 GB/s are 274.2.
    one = next(
        each
        for each in held_out("far", "cx7_400g")
        if (each.profile.name, each.row.ranks, each.direction) == ("h100_nccl_ep", 32, "dispatch")
    )
    assert one.published_us == pytest.approx(1024 * 14352 / 53.6e3) and one.predicted_us == pytest.approx(
        274.5, abs=0.1
    )


def test_a_table_is_predicted_without_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rows of 8 ranks fit the constants of nvlink4. Whatever they are, the prediction of their own table stays.
    before = {(e.profile.name, e.row.ranks, e.direction): e.predicted_us for e in held_out()}
    tables = [link_profile(name) for name in shipped_links()]

    def three_times(row: Measured) -> Measured:
        return row.model_copy(update={"dispatch_us": 3 * row.dispatch_us, "combine_us": 3 * row.combine_us})

    slow = [
        p.model_copy(update={"measured": tuple(three_times(row) for row in p.measured)}) if p.name == "sm90_pplx" else p
        for p in tables
    ]
    monkeypatch.setattr("moe_mk.lab.plan.predict._tables", lambda: tuple(slow))
    held_out.cache_clear(), _constants.cache_clear()
    try:
        after = {(e.profile.name, e.row.ranks, e.direction): e.predicted_us for e in held_out()}
    finally:
        held_out.cache_clear(), _constants.cache_clear()
    assert all(after[key] == before[key] for key in before if key[0] == "sm90_pplx")
    assert after["sm90_deepep", 8, "combine"] > 2 * before["sm90_deepep", 8, "combine"]


def test_an_answer_counts_held_out_values_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    some = held_out()[0]
    errors = (0.5, -0.6, -0.1, 0.15, -0.3)
    found = [replace(some, predicted_us=(1 + e) * some.published_us, is_fitted=False) for e in errors]
    monkeypatch.setattr(
        "moe_mk.lab.plan.predict.held_out", lambda *_: (*found, replace(some, predicted_us=0.0, is_fitted=True))
    )
    basis = predict(link_profile(links_of_device("h100")), Exchange(128, 8, 8), "latency", "dispatch").basis
    assert "of 5 values of other tables" in basis
    assert basis.endswith("2 are met within 20 %, median 30.0 %, worst -60 %")


@pytest.mark.parametrize("device", ["h100", "h200", "b200", "gb200_nvl72", "mi300x"])
def test_devices_have_links_with_a_fixed_cost_inside_a_node(device: str) -> None:
    profile = link_profile(links_of_device(device))
    near = [
        predict(profile, Exchange(tokens, 8, profile.ranks_per_node), "latency", "dispatch").us for tokens in (1, 128)
    ]
    assert 15 < near[0] < near[1] < 60, "a token costs the latency of the links, 128 tokens little more"
    far = predict(
        profile,
        Exchange(128, 4 * profile.ranks_per_node, profile.ranks_per_node, num_experts=288),
        "latency",
        "dispatch",
    )
    assert far.us > near[1] and "between nodes" in far.basis
    assert "values of other tables that no constant was fitted to" in far.basis
    for name in ("a100", "h800_cx7"):  # which is a table
        with pytest.raises(ConfigError, match=f"no link profile of device '{name}'"):
            links_of_device(name)


def test_forwarding_inside_nodes_is_the_limit_of_two_nodes_of_h800() -> None:
    # 6.53 rows a token reach the ranks of two nodes over NVLink, one remote row in two over the network: 43 GB/s of 50
    # are not the network's limit but NVLink's.
    profile = link_profile("h800_cx7")
    exchange = Exchange(4096, 16)
    assert exchange.near_bytes("throughput", "dispatch") / (4096 * 7392) == pytest.approx(6.53, abs=0.01)
    found = next(
        each
        for each in held_out()
        if (each.profile.near, each.row.mode, each.row.ranks) == ("nvlink_h800", "throughput", 16)
    )
    assert found.predicted_us > 1.5 * (34.6 + exchange.remote_bytes("throughput", "dispatch") / 45.94e3)
    assert abs(found.error) < 0.11
    assert profile.near == "nvlink_h800"


def test_the_page_states_the_constants_and_the_errors_of_every_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
    for kind, mode in (
        ("nvlink4", "latency"),
        ("nvlink5", "latency"),
        ("nvlink_h800", "latency"),
        ("xgmi_mi300x", "latency"),
    ):
        found = _constants("near", kind, mode, "dispatch", "")
        line = next(line for line in page.splitlines() if line.startswith(f"| `{kind}`"))
        assert found is not None and f"| {found[0].alpha_us:.1f} us | {found[0].gbs:.0f} GB/s |" in line
    for kind in ("cx7_400g", "efa_8x400g"):
        line = next(line for line in page.splitlines() if line.startswith(f"| `{kind}`"))
        both = [_constants("far", kind, "throughput", each, "")[0] for each in DIRECTIONS]
        assert ", ".join(f"{each.gbs:.1f}" for each in both) + " GB/s" in line
    names = dict.fromkeys(each.profile.name for each in held_out())
    near = sum(abs(each.error) <= 0.2 for each in held_out())
    assert f"Of {len(held_out())} values of {len(names)} tables {near} are within 20 %" in page
    worst = {name: max((one.error for one in held_out() if one.profile.name == name), key=abs) for name in names}
    for name in sorted(names, key=lambda name: -abs(worst[name]))[:3]:
        digits = 0 if abs(worst[name]) >= 1 else 1
        assert f"{100 * worst[name]:+.{digits}f} % (`{name}`)" in " ".join(page.split())
