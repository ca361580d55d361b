"""Tokens by number and by list, and hidden states from files, good and bad."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moe_mk.config.shipped import load_config
from moe_mk.errors import ConfigError, ShapeError
from moe_mk.lab.cli.inputs import (
    RunSettings,
    batch_of,
    dtype_of,
    hidden_states,
    read_hidden_states,
    token_counts,
    tokens_of,
)

CONFIG = load_config("tiny")  # hidden size 64


def settings(**changes: object) -> RunSettings:
    return RunSettings(Path("nowhere"), 3, CONFIG, **changes)  # type: ignore[arg-type]


def test_a_number_or_a_list_is_read() -> None:
    assert tokens_of("64") == (64,) and tokens_of("0,0,7,1") == (0, 0, 7, 1)


@pytest.mark.parametrize(
    "text,complaint",
    [("", "not a number"), ("1,x", "0,0,7,1"), ("3,-1", "outside \\[0, 2147483647\\]"), ("1.5", "not a")],
)
def test_other_texts_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        tokens_of(text)


def test_one_number_stands_for_every_batch() -> None:
    assert token_counts(settings(), 3) == (64, 64, 64)
    assert token_counts(settings(tokens=(5,)), 3) == (5, 5, 5)
    assert token_counts(settings(tokens=(0, 7)), 2) == (0, 7)
    with pytest.raises(ConfigError, match="lists 3 numbers for 2 batches of tokens; give one number or 2"):
        token_counts(settings(tokens=(1, 2, 3)), 2)


def test_a_file_is_shared_out(tmp_path: Path) -> None:
    file = tmp_path / "rows.npy"
    np.save(file, np.arange(5 * 64, dtype=np.float64).reshape(5, 64))
    asked = settings(hidden_states=file, dtype="float32")
    # 5 rows over 3 batches: 2 + 2 + 1, as given: 0 + 4 + 1.
    assert token_counts(asked, 3) == (2, 2, 1)
    assert [int(hidden_states(asked, (2, 2, 1), b)[0, 0]) // 64 for b in range(3)] == [0, 2, 4]
    given = settings(hidden_states=file, tokens=(0, 4, 1), dtype="float32")
    assert token_counts(given, 3) == (0, 4, 1)
    assert [hidden_states(given, (0, 4, 1), b).shape for b in range(3)] == [(0, 64), (4, 64), (1, 64)]
    assert hidden_states(given, (0, 4, 1), 2)[0, 0] == 4 * 64
    with pytest.raises(ConfigError, match="adds up to 3, but .* holds 5 rows; drop --tokens"):
        token_counts(settings(hidden_states=file, tokens=(1, 1, 1)), 3)


def test_random_rows_are_normed_and_repeat() -> None:
    asked = settings(seed=7, dtype="float32")
    first = hidden_states(asked, (4, 4), 0)
    assert first.dtype == torch.float32
    assert torch.allclose(first.square().mean(1), torch.ones(4), atol=1e-6)
    assert torch.equal(first, hidden_states(asked, (4, 4), 0))
    assert not torch.equal(first, hidden_states(asked, (4, 4), 1))
    assert not torch.equal(first, hidden_states(settings(seed=8, dtype="float32"), (4, 4), 0))
    assert hidden_states(asked, (0,), 0).shape == (0, 64)


def test_safetensors_hold_one_tensor_or_name_it(tmp_path: Path) -> None:
    rows = torch.randn(3, 64).bfloat16()
    save_file({"anything": rows}, tmp_path / "one.safetensors")
    save_file({"hidden_states": rows, "another": torch.zeros(1)}, tmp_path / "named.safetensors")
    save_file({"a": rows, "b": rows.clone()}, tmp_path / "two.safetensors")
    assert torch.equal(read_hidden_states(tmp_path / "one.safetensors", 64), rows)
    assert torch.equal(read_hidden_states(tmp_path / "named.safetensors", 64), rows)
    with pytest.raises(ConfigError, match="holds 2 tensors, none of them called hidden_states"):
        read_hidden_states(tmp_path / "two.safetensors", 64)


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a file"):
        read_hidden_states(tmp_path / "absent.npy", 64)
    (tmp_path / "text.npy").write_text("hello")
    (tmp_path / "text.safetensors").write_text("hello")
    np.save(tmp_path / "object.npy", np.array([{}]), allow_pickle=True)
    np.save(tmp_path / "swapped.npy", np.zeros((2, 64), dtype=">f4"))
    for name in ("text.npy", "text.safetensors", "object.npy", "swapped.npy"):
        with pytest.raises(ConfigError, match=f"{name} cannot be read"):
            read_hidden_states(tmp_path / name, 64)


@pytest.mark.parametrize("rows,words", [
    (np.zeros((2, 65)), "rows.npy"), (np.zeros(64), "rows.npy"), (np.zeros((2, 64), dtype=np.int64), "rows.npy"),
    (np.full((2, 64), np.nan), "NaN"),
])  # fmt: skip
def test_rows_of_another_shape_or_dtype_and_no_numbers_are_refused(tmp_path: Path, rows: Any, words: str) -> None:
    np.save(tmp_path / "rows.npy", rows)
    with pytest.raises(ShapeError, match=words):
        read_hidden_states(tmp_path / "rows.npy", 64)


def test_a_dtype_has_a_name() -> None:
    assert dtype_of("float16") is torch.float16
    with pytest.raises(ConfigError, match="--dtype 'bfloat' is unknown; did you mean 'bfloat16'"):
        dtype_of("bfloat")


def test_token_ids_are_drawn_of_the_vocabulary_for_layers_that_choose_by_them() -> None:
    config = CONFIG.with_(hash_vocabulary=7, has_correction_bias=False)
    asked = RunSettings(Path("nowhere"), 3, config)
    one, other = (batch_of(asked, (50, 50), batch).token_ids_T for batch in (0, 1))
    assert one is not None and other is not None and not torch.equal(one, other)
    assert set(one.tolist()) == set(range(7)) and one.shape == (50,)
    first = batch_of(asked, (50, 50), 0).first
    assert first.token_ids_T is not None and first.token_ids_T.tolist() == one[:1].tolist()
    assert len(first.x_TH) == 1
    assert batch_of(settings(), (3,), 0).token_ids_T is None


def test_token_ids_of_a_file_are_shared_out_as_its_rows_are(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(5, dtype=np.int32))
    given = settings(token_ids=tmp_path / "ids.npy")
    shares = [batch_of(given, (2, 0, 3), batch).token_ids_T for batch in range(3)]
    assert [share.tolist() for share in shares if share is not None] == [[0, 1], [], [2, 3, 4]]
