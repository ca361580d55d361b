"""Tiles by rows an expert: measured inside the tuned range, built in outside, and a bad file is named."""

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_mk.config.tuned import Case, Point, Tuned
from moe_mk.errors import ConfigError
from moe_mk.experts.base import ExpertsContext
from moe_mk.experts.triton.experts import TritonExperts
from moe_mk.experts.triton.tuning import BUILT_IN, CANDIDATES, DECODED, load_tuned, of_engines, tile_of, tuned_folder
from moe_mk.experts.triton.workspace import Workspace
from moe_mk.kernels.triton.tile import Tile
from moe_mk.lab.testing.experts import random_experts
from moe_mk.lab.tuning import TunedPoint, save_measured, tuned_path
from moe_mk.lab.tuning.session import TuneCase
from moe_mk.quant import BF16, FP8_1x128, FP8_128x128, QuantScheme
from moe_mk.quant.microscaling import MXFP4
from moe_mk.tokens import RowTokens

CPU = torch.device("cpu")
CASE = Case(7168, 2048, 256, "fp8_128x128", "fp8_1x128")
SMALL, LARGE = Tile(8, True, 4, 6, "gluon"), Tile(128, False, 4, 4, "gluon")
TUNED = Tuned((Point(1.0, SMALL, 100.0), Point(16.0, LARGE, 400.0)), BUILT_IN)
UNTUNED = Tuned((), BUILT_IN)


def test_outside_the_range_nothing_is_extrapolated() -> None:
    for rows, place in ((0.5, 0), (17.0, 1), (1e6, 3)):
        assert TUNED.point(rows) is None and TUNED.microseconds(rows) is None
        assert TUNED.at(rows) == BUILT_IN[place][1] == UNTUNED.at(rows)


def file_in(folder: Path) -> Path:
    """The file of CASE with 8 experts a token: 32 tokens are one row an expert, 512 are 16."""
    path = tuned_folder("h200", folder) / "H7168_I2048_L256_K8_fp8_128x128_fp8_1x128.json"
    assert path == tuned_path("NVIDIA H200", "triton", CASE.name(8), folder)
    return path


def one_point(tokens: float, tile: dict[str, object]) -> str:
    return json.dumps({"points": [{"tokens": tokens, "parameters": tile, "microseconds": 1}]})


def test_a_missing_file_is_one_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert load_tuned("h200", CASE, tmp_path, log=False) == UNTUNED and not caplog.messages
        assert [load_tuned("h200", CASE, tmp_path) for _ in range(3)] == [UNTUNED] * 3
    assert (
        len(caplog.messages) == 1
        and "NVIDIA_H200/triton/H7168_I2048_L256_K*_fp8_128x128_fp8_1x128.json" in caplog.messages[0]
    )


@pytest.mark.parametrize(
    "content,complaint",
    [
        ("{", "JSONDecodeError"),
        (one_point(1, {"rows": 12}), "1 tokens: .* is not a tile"),
        (one_point(1, vars(SMALL) | {"rows": 9}), "1 tokens: .*no kernel multiplies .*rows=9"),
    ],
)
def test_a_file_that_holds_no_tiles_is_refused_by_name(tmp_path: Path, content: str, complaint: str) -> None:
    file = file_in(tmp_path)
    file.parent.mkdir(parents=True)
    file.write_text(content)
    with pytest.raises(ConfigError, match=rf"H7168.*{complaint}"):
        load_tuned("h200", CASE, tmp_path)


def test_files_of_tuning_sessions_are_read_by_their_top_k(tmp_path: Path) -> None:
    path = file_in(tmp_path)
    save_measured(path, [TunedPoint(512, asdict(LARGE), 400.0), TunedPoint(32, asdict(SMALL), 100.0)], {})
    save_measured(path.with_name("H7168_I2048_L256_K8_mxfp4_bf16.json"), [TunedPoint(32, asdict(LARGE), 1.0)], {})
    assert load_tuned("h200", CASE, tmp_path) == TUNED
    save_measured(path.with_name(f"{CASE.name(2)}.json"), [TunedPoint(8192, asdict(LARGE), 900.0)], {})
    assert [point.rows_an_expert for point in load_tuned("h200", CASE, tmp_path).points] == [1.0, 16.0, 64.0]


def test_every_spelling_of_a_device_is_one_folder(tmp_path: Path) -> None:
    (tmp_path / "NVIDIA_GeForce_X").mkdir()
    assert tuned_folder("nvidia_geforce_x", tmp_path).parent.name == "NVIDIA_GeForce_X"
    for name in ("h200", "NVIDIA H200", "nvidia_h200"):
        assert tuned_folder(name, tmp_path).parent.name == "NVIDIA_H200"


def test_what_is_tried_fits_and_suits_the_rows() -> None:
    context = ExpertsContext(BF16, FP8_1x128, "silu", 256, 7168, 2048, torch.device("cpu"))
    few, many = (TritonExperts.tuning_space(context, tokens) for tokens in (1, 16384))
    assert {tile["rows"] for tile in few} == {8, 16, 32} and {tile["engine"] for tile in few} == {"triton", "gluon"}
    assert {tile["rows"] for tile in many} == {64, 128}
    plain = TritonExperts.tuning_space(replace(context, compute=BF16), 1)
    assert {tile["engine"] for tile in plain} == {"triton"}
    assert all(tile_of(tile) in (*CANDIDATES, *of_engines()) for tile in (*few, *many, *plain))


class Launched(Exception):
    """A tile that a kernel was asked for; nothing runs here."""


CALLS = [(1, 2), (16, 8), (64, 2), (64, 8), (256, 4), (1024, 6)]
"""Tokens and experts of a token, of eight: from a quarter of a row an expert to 768."""


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("stored,compute", [(FP8_128x128, FP8_1x128), (FP8_128x128, BF16), (MXFP4, BF16), (BF16, BF16)])
def test_the_first_one_tried_is_what_the_kernels_get_untuned(
    stored: QuantScheme, compute: QuantScheme, invariant: bool
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    contexts = {
        call: replace(
            TuneCase("triton", 128, 128, 8, call[1], BF16, compute, stored).context(CPU), batch_invariant=invariant
        )
        for call in CALLS
    }
    experts = TritonExperts(contexts[CALLS[0]], Workspace())
    experts.kernels = SimpleNamespace(Experts=experts.kernels.Experts, experts_rows=launched)
    weights = experts.relayout(random_experts(stored, 8, 128, 128, CPU))
    for (tokens, top_k), context in contexts.items():
        x_RH = BF16.quantize(torch.zeros((tokens, 128), dtype=torch.bfloat16))
        ids_RK = torch.arange(top_k, dtype=torch.int32).expand(tokens, top_k)
        with pytest.raises(Launched) as caught:
            experts.run(RowTokens(x_RH, ids_RK, torch.ones((tokens, top_k)), 8), weights)
        tried = [tile_of(tile) for tile in TritonExperts.tuning_space(context, tokens)]
        assert tried[0] == caught.value.args[0] and len(set(tried)) == len(tried)


def launched(
    x: object, ids: object, share: object, experts: object, tile: Tile, *rest: object, **named: object
) -> None:
    raise Launched(tile)


@pytest.mark.parametrize(
    "wrong,stated",
    [
        ({"rows": 24}, r"no kernel multiplies .*rows=24"),
        ({"stages": 9}, "1 to 8 stages"),
        ({"warps": 3}, "4 or 8 warps"),
        ({"stages": 8}, r"needs 278528 B of shared memory, a program has 232448; at most 6 stages fit"),
        ({"colour": 1}, "unexpected keyword"),
    ],
)
def test_a_tile_that_cannot_be_is_refused_by_name(wrong: dict[str, int], stated: str) -> None:
    with pytest.raises(ConfigError, match=rf"is not a tile of the Triton experts: .*{stated}"):
        tile_of(asdict(Tile(16, True, 4, 5)) | wrong)


def test_a_built_in_tile_serves_every_number_of_rows() -> None:
    assert BUILT_IN[-1][0] == float("inf")
    assert [UNTUNED.at(rows).rows for rows in (0.01, 8.0, 8.1, 20.0, 80.0, 81.0, 1e9)] == [16, 16, 32, 32, 64, 128, 128]
    assert all(tile.engine == "triton" for _, tile in (*BUILT_IN, *DECODED)), (
        "what was never run on a GPU is not chosen unasked"
    )
