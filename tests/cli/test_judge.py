"""`moe-mk judge`: exit codes, JSON, the page, and cases whose weights are in a checkpoint."""

import json
from dataclasses import replace
from html import escape
from html.parser import HTMLParser

import pytest
import torch

from moe_mk.lab.judge import Case, write_case
from moe_mk.lab.verify.dense import dense_layer
from moe_mk.layer.settings import config_of, layer_spec_of
from moe_mk.weights.checkpoint import load_layer
from moe_mk.weights.gguf_source import open_source
from tests.support.small_engine import Layer


@pytest.fixture
def file(tmp_path):
    return tmp_path / "case.safetensors"


def test_a_right_case_exits_with_0_and_a_wrong_one_with_1(file, invoke):
    layer = Layer(seed=1, tokens=5)
    write_case(file, layer.case(layer_name="layers.3", versions={"engine": "0.9"}))
    right = invoke("judge", file)
    assert right.exit_code == 0 and "right within the limits" in right.stdout and "engine 0.9" in right.stdout
    write_case(file, layer.case("gate and up swapped"))
    wrong = invoke("judge", file)
    assert wrong.exit_code == 1 and "First stage that departs: w13" in wrong.stdout
    assert "gate and up swapped" in wrong.stdout


def test_what_is_no_case_exits_with_2(file, tmp_path, invoke):
    file.write_bytes(b"no case")
    for path in (file, tmp_path / "missing", tmp_path):
        assert invoke("judge", path).exit_code == 2
    write_case(file, Layer(tokens=2).case(w13=None, w2=None, experts=None))
    found = invoke("judge", file)
    assert found.exit_code == 2 and "--checkpoint" in found.stderr


def test_json_has_a_verdict_for_each_case(file, tmp_path, invoke):
    write_case(file, Layer(seed=2, tokens=4).case("never renormalised"))
    write_case(right := tmp_path / "right.safetensors", Layer(seed=2, tokens=4).case())
    found = invoke("judge", file, right, "--json")
    verdicts = json.loads(found.stdout)
    assert found.exit_code == 1 and len(verdicts) == 2
    assert (verdicts[0]["stage"], verdicts[0]["fault"]) == ("weights", "never renormalised")


def test_rows_that_depend_on_the_other_tokens_are_stated(file, tmp_path, invoke):
    case, alone = Layer(seed=2, tokens=4).case(gate=None, router_logits=None, bias=None), tmp_path / "alone.safetensors"
    write_case(file, case)
    one = {name: getattr(case, name)[2:3] for name in ("x", "y", "topk_ids", "topk_weights")}
    write_case(alone, replace(case, **one))
    assert "depends on" not in invoke("judge", file, alone).stdout
    one["y"] = one["y"].clone()
    one["y"][0, 7] = torch.nextafter(one["y"][0, 7], torch.tensor(9.0, dtype=torch.bfloat16))
    write_case(alone, replace(case, **one))
    found = invoke("judge", file, alone, "--json")
    (depends,) = json.loads(found.stdout)[0]["depends"]
    assert found.exit_code == 0 and (depends["law"], depends["stage"]) == ("count of tokens", "shared")
    assert (depends["rows"], depends["differing"], depends["other"]) == (1, 1, 1)
    assert "count of tokens: 1 of 1 equal tokens" in " ".join(invoke("judge", file, alone).stdout.split())


class Tags(HTMLParser):
    """Tags of a page, and what it would load."""

    def __init__(self):
        super().__init__()
        self.tags, self.loads, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_loads_nothing_and_escapes_names(file, tmp_path, invoke):
    page = tmp_path / "verdict.html"
    case = Layer(seed=2, tokens=6).case("scale", layer_name="<script>alert(1)</script>", versions={"<b>": "&"})
    y = case.y.clone()
    y[3] *= 2
    write_case(file, replace(case, y=y))
    assert invoke("judge", file, "--html", page).exit_code == 1
    text = page.read_text()
    tags = Tags()
    tags.feed(text)
    (explained,) = json.loads(invoke("judge", file, "--json").stdout)
    for each in explained["explanations"]:
        cells = [" and ".join(each["faults"]), " and ".join(filter(None, each["details"])), each["stage"]]
        assert "".join(f"<td>{escape(cell)}</td>" for cell in cells) in text
    assert not tags.open and not tags.loads and "script" not in tags.tags and "http" not in text
    assert tags.tags.count("table") == 3 and "&lt;script&gt;" in text


def test_weights_of_a_checkpoint_judge_a_case_without_them(file, tiny, invoke):
    config = config_of(tiny, 3)
    experts = range(config.model.num_experts)
    weights = load_layer(open_source(tiny), 3, layer_spec_of(config), owned=experts)
    x = torch.randn((4, config.model.hidden_size), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    dense = dense_layer(x, config, weights)
    case = Case(
        model=config.model, router=config.router, x=x, y=dense.y_TH.to(torch.bfloat16), bias=weights.bias_E, layer=3,
        topk_ids=torch.from_numpy(dense.ids_TK), topk_weights=torch.from_numpy(dense.weights_TK), checkpoint="tiny",
    )  # fmt: skip
    write_case(file, case)
    assert invoke("judge", file, "--checkpoint", tiny).exit_code == 0
    write_case(file, replace(case, y=dense.y_TH.flip(1).to(torch.bfloat16)))
    assert invoke("judge", file, "--checkpoint", tiny).exit_code == 1
