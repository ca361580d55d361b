"""Every example runs as a newcomer runs it, and states something that is true."""

import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_mk.lab.trace.routing import RoutingTrace

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SLOW_MACHINE_S = 300
pytestmark = pytest.mark.timeout(2 * SLOW_MACHINE_S)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(*command: str) -> str:
    """What an example prints; fails with all it stated if it does not end well."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SLOW_MACHINE_S
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def example(name: str) -> str:
    return str(EXAMPLES / name)


def test_every_example_is_run_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert [file.name for file in sorted(EXAMPLES.glob("*.py")) if f'"{file.name}"' not in text] == []


@pytest.mark.slow
def test_the_layer_explains_itself_and_counts_the_load(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(example("01_layer.py"), run_name="__main__")
    stated = capsys.readouterr().out
    assert "rank 0: 16 experts" in stated
    assert re.search(r"^\* no_ep +\+ \w+ ", stated, re.MULTILINE)
    assert re.search(r"refused [^:]*all_to_all[^:]* \+ any: needs 2 ranks or more", " ".join(stated.split()))
    assert "input (64, 256) -> output (64, 256) torch.bfloat16" in stated
    load = [int(count) for count in re.findall(r"chose each expert: \[(.*)\]", stated)[0].split(", ")]
    assert len(load) == 16 and sum(load) == 64 * 8
    assert "512 assignments" in stated


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["by_itself", "torchrun"])
def test_two_ranks_give_what_one_rank_gives(launcher: tuple[str, ...]) -> None:
    stated = run(*launcher, example("02_torchrun_ep.py"))
    found = re.findall(r"rank (\d): experts ([\d-]+), (\d+) tokens, sent ([\d,]+) B, .* one rank (\S+)", stated)
    assert [(rank, owned, tokens) for rank, owned, tokens, _, _ in found] == [("0", "0-7", "48"), ("1", "8-15", "5")]
    for *_, sent, error in found:
        assert int(sent.replace(",", "")) > 0
        # Sums over ranks round partial sums to bf16 once more than one rank does: at most 2^-8 of each of two parts.
        assert float(error) < 2 * 2**-8


@pytest.mark.slow
def test_the_oracle_plans_machines_that_are_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(example("03_explain_hypothetical.py"), run_name="__main__")
    stated = capsys.readouterr().out
    table = dict(re.findall(r"^(\w+ +\d+ +\d+) +(\w+ \+ \w+)", stated, re.MULTILINE))
    assert [" ".join(row.split()) for row in table] == [
        "cpu 2 1", "h100 8 1", "h200 8 1", "h200 32 4", "h200 144 18", "b200 32 4",
    ]  # fmt: skip
    assert "no pair that is pinned (kernel.prepare_finalize = no_ep) can serve" in stated
    assert "serves 1 rank, the group has 32" in stated and "kernel.graphs = false" in stated


@pytest.mark.slow
def test_a_backend_of_ones_own_is_chosen_and_agrees_with_the_reference() -> None:
    stated = run(example("09_own_backend.py"))
    assert "no_ep + my_loop: pinned by kernel.experts = my_loop" in stated
    assert {"  no_ep + my_loop", "  no_ep + reference"} <= set(stated.splitlines())
    # bf16 once for each of seven roundings of the loop that the f32 reference does not make, added as squares.
    assert float(re.findall(r"reference: (\S+),", stated)[0]) < 7**0.5 * 2**-8


@pytest.mark.slow
def test_experts_move_while_four_ranks_serve() -> None:
    stated = run(example("06_live_rebalance.py"))
    moved, predicted = re.findall(r"moved ([\d,]+) B of ([\d,]+) B predicted; incidents: 0", stated)[0]
    assert moved == predicted != "0"
    before, *_, after = re.findall(r"busiest rank (\S+) x mean", stated)
    assert float(before) > 1.5 and float(after) < 1.01
    assert "epoch 0, moving" in stated and "epoch 1, watching" in stated


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model after eight steps of training: it mumbles, and its FP8 checkpoint is within 1 % of bf16 in perplexity."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    stated = run(example("07_train_tiny.py"), str(folder), "--steps", "8", "--experts", "16")
    bits = [float(number) for number in re.findall(r"step +\d+: (\S+) bits a byte", stated)]
    assert bits[0] > 7.5 and bits[-1] < 6.0, f"it learns nothing: {bits}"
    ratio = float(re.findall(r"perplexity x (\S+)", stated)[0])
    assert abs(ratio - 1) <= 0.01
    return folder


@pytest.mark.stress
def test_experts_of_the_tiny_model_are_reported_by_kind_and_leave_a_trace(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'moe-mk[lab]'")
    # After the eight steps of `tiny_model` the gate of layer 2 has learned nothing yet.
    folder, file = tmp_path / "tiny", tmp_path / "trace.safetensors"
    run(example("07_train_tiny.py"), str(folder), "--steps", "15", "--experts", "16")
    stated = run(example("07_load_map.py"), str(folder), "--trace", str(file), "--docs", str(tmp_path))
    rows = re.findall(r"^\| (\d) \| (\S+) % \| (\S+) % ", stated, re.MULTILINE)
    assert [int(layer) for layer, _, _ in rows] == [1, 2, 3]
    # Even a gate that has learned little distinguishes kinds better than chance.
    assert all(float(kinds) > 2 * float(shuffled) for _, kinds, shuffled in rows)
    trace = RoutingTrace.read(file)
    assert (trace.num_rows, trace.facts.num_ranks, trace.facts.num_experts) == (3 * 64 * 128, 4, 16)
    page = (tmp_path / "training.md").read_text(encoding="utf-8")
    assert "--steps 15 --experts 16" in page and "three of 16 experts" in page
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.row("23a")
@pytest.mark.slow
def test_a_block_looks_back_only_and_adds_its_experts_to_the_residual(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    model = importlib.import_module("05_nano_engine").NanoModel.load(tiny_model)
    text = torch.tensor([list(b"import os\nclass Longer:\n    pass\n")])
    other, changed = text.clone(), 12
    other[0, changed:] = (other[0, changed:] + 1) % 128
    before_TV, after_TV = model.logits(text)[0], model.logits(other)[0]
    # Experts meet other batches, so that sums of bf16 products may round the other way; nothing else differs.
    torch.testing.assert_close(after_TV[:changed], before_TV[:changed], atol=0.1, rtol=0)
    assert ((after_TV[changed:] - before_TV[changed:]).abs().amax(dim=1) > 0.1).all()

    last, norm, seen = max(model.moe), model._norm, {}

    def normed(x_TH: torch.Tensor, name: str) -> torch.Tensor:
        seen[name] = x_TH
        return norm(x_TH, name)

    monkeypatch.setattr(model, "_norm", normed)
    monkeypatch.setitem(model.moe, last, torch.zeros_like)
    model.logits(text)
    residual_TH = seen["model.norm"].clone()
    assert torch.equal(residual_TH, seen[f"model.layers.{last}.post_attention_layernorm"])
    delta_TH = torch.randn_like(residual_TH)
    monkeypatch.setitem(model.moe, last, lambda x_TH: delta_TH)
    model.logits(text)
    assert torch.equal(seen["model.norm"], residual_TH + delta_TH)


@pytest.mark.slow
def test_the_engine_writes_the_same_on_one_rank_and_on_two(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [str(tiny_model), "--new", "6", "--prompt", "def main(", "--prompt", "import "]
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["05_nano_engine.py", *asked, "--ranks", "1"])
    importlib.import_module("05_nano_engine").main()
    alone, together = capsys.readouterr().out, run(example("05_nano_engine.py"), *asked, "--ranks", "2")
    for stated, ranks in ((alone, 1), (together, 2)):
        assert f"--- 2 requests on {ranks} rank" in stated and "6 steps" in stated
    written, other = (stated.split("--- 2 requests")[0] for stated in (alone, together))
    assert written == other and "def main(" in written


@pytest.mark.slow
def test_the_engine_chooses_what_a_full_forward_finds_likeliest(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Continuous batching with caches against one forward over the whole text, without any cache.
    monkeypatch.syspath_prepend(str(EXAMPLES))
    engine = importlib.import_module("05_nano_engine")
    prompts = [b"def main(", b"x", b"import os\nclass Longer:\n"]
    requests = [engine.Request(prompt, 5 + number) for number, prompt in enumerate(prompts)]
    engine.serve(tiny_model, requests, None)
    model = engine.NanoModel.load(tiny_model)
    for request in requests:
        text = [*request.prompt, *request.written]
        logits_TV = model.logits(torch.tensor([text]))[0][len(request.prompt) - 1 : -1]
        chosen_T = logits_TV.gather(1, torch.tensor(request.written)[:, None])[:, 0]
        # bf16 rounds a batch and its parts in other orders: near ties may go either way, nothing else.
        assert bool((chosen_T >= logits_TV.amax(1) - 0.05).all())
    drawn = [engine.Request(b"def ", 8, temperature=1.0, seed=7) for _ in range(2)]
    engine.serve(tiny_model, drawn, None)
    assert drawn[0].written == drawn[1].written and drawn[0].written != requests[0].written

    # The same with memory for a third of the experts.
    paged = engine.Request(b"def ", 8, temperature=1.0, seed=7)
    _, small = engine.serve(tiny_model, [paged], None, experts_bytes=16 * 102_400)
    counts = [layer.report().residency for layer in small.model.moe.values()]
    assert sum(each.slots for each in counts) == 16 and all(each.reads > 5 for each in counts)
    assert paged.written == drawn[0].written


@pytest.mark.parametrize(
    ("script", "arguments", "stated"),
    [
        ("05_nano_engine", ["--ranks", "0"], "--ranks 0 does not divide 16 experts"),
        ("05_nano_engine", ["--ranks", "3"], "--ranks 3 does not divide 16 experts"),
        ("05_nano_engine", ["--prompt", ""], "a prompt has 1 to 1008 bytes, not 0"),
        ("05_nano_engine", ["--new", "0"], "0 new bytes at temperature 0.0: at least 1"),
        ("05_nano_engine", ["--temperature", "-1"], "64 new bytes at temperature -1.0: at least 1, at least 0"),
        ("07_train_tiny", ["--steps", "0"], "--steps 0 --experts 32: 1 step or more"),
        ("07_train_tiny", ["--experts", "6"], "4 groups of 2 experts or more"),
    ],
)
@pytest.mark.slow
def test_what_cannot_work_is_refused_before_any_work(
    script: str,
    arguments: list[str],
    stated: str,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [script, str(tiny_model), *arguments])
    before = sorted(tiny_model.iterdir())
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(script).main()
    assert ended.value.code == 2 and stated in capsys.readouterr().err
    assert sorted(tiny_model.iterdir()) == before


@pytest.mark.slow
def test_transformers_generates_with_its_experts_computed_here() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'moe-mk[hf]'")
    stated = run(example("08_hf_generate.py"))
    assert "2 experts modules by moe_mk" in stated
    assert "computes in bf16, the layer is fp32" in " ".join(stated.split()), "it is wrapped"
    assert "experts are held as torch.float8_e4m3fn" in stated
    assert "equal to transformers' own experts: True" in stated
    assert "equal with whole blocks patched: True" in stated
    # 6 tokens of the prompt and the 11 that are fed back, top-2, 17 * 2; generation runs the layer on all of them.
    load = [int(count) for count in re.findall(r"layers\.1\.mlp: \[(.*)\]", stated)[0].split(", ")]
    assert len(load) == 8 and sum(load) == 17 * 2
