"""What is used of torch and others that they may change: it holds here, and what would not hold is found."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "operator_schemas.py"


def check(*arguments):
    done = subprocess.run([sys.executable, "-W", "ignore", str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("operator_schemas", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["operator_schemas"] = module  # data classes look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules["operator_schemas"]


def faults(tool, text):
    return [fault for use in tool.uses(text, "here.py") if (fault := tool.fault_of(use))]


def test_everything_that_is_used_is_there_and_takes_its_arguments():
    code, printed = check("--json")
    found = json.loads(printed)
    assert (code, found["faults"]) == (0, []), printed
    assert found["uses"] > 80
    assert found["versions"]["torch"] and found["versions"]["ray"]


def test_the_kernel_of_packed_rows_is_in_the_table(tool):
    found, _ = tool.check(tool.SOURCE / "model", ["torch"])
    calls = {use.name: use.arguments for use, fault in found if use.positional is not None and not fault}
    assert calls["torch.ops.torch_attn._varlen_attn"] == "10 by position, or more"
    assert calls["torch.ops.torch_attn._varlen_attn_backward"] == "14 by position"


def test_an_argument_too_many_of_a_private_operator_is_found(tool, tmp_path):
    source = (tool.SOURCE / "model" / "varlen.py").read_text()
    planted = source.replace("call.window_size, *shared)", "call.window_size, True, None, None, None, None, None, None, None)")
    assert planted != source
    (tmp_path / "varlen.py").write_text(planted)
    code, printed = check("--source", str(tmp_path))
    assert code == 1 and "arguments by position, not 18" in printed


@pytest.mark.parametrize(("text", "fault"), [
    ("import torch\nops = torch.ops.mkldnn\nops._reorder_linear_weight(1, 2, 3, 4, 5, 6)", "takes at most"),
    ("import torch\ntorch.ops.mkldnn._reorder_linear_weight(1, colour=2)", "knows no argument colour"),
    ("import torch\ntorch.ops.mkldnn._linear_pointwise(1)", "needs "),
    ("import torch\ntorch.ops.mkldnn._not_there(1)", "is not there"),
    ("from transformers.core_model_loading import not_there", "is not there"),
    ("from torch._guards import detect_fake_mode\ndetect_fake_mode(1, 2, 3)", "too many positional arguments"),
    ("from transformers.utils.logging import disable_progress_bar as hide\nhide(loud=True)", "unexpected keyword argument 'loud'"),
])
def test_what_does_not_hold_is_found(tool, text, fault):
    assert [fault in found for found in faults(tool, text)] == [True], faults(tool, text)


def test_a_module_that_has_the_name_of_a_function_is_told_from_it(tool):
    assert faults(tool, "from ray.util.placement_group import placement_group\nplacement_group([], strategy='PACK')") == []
