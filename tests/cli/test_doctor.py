"""`offbeat doctor`."""

import argparse
import json
import subprocess
import sys

from offbeat.cli import doctor
from offbeat.cli.main import main
from offbeat.cpu import Cpu
from offbeat.machine import Device


def call(*argv):
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return doctor.run(parser.parse_args(argv))


def test_json_lists_every_check_of_this_machine(capsys):
    code = call("--json")
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    machine = {"python", "offbeat", "torch", "CPU", "cores", "OMP_WAIT_POLICY", "memory", "disk", "loopback port", "Python tool"}
    machine |= {"devices", "model.dtype", "train.precision", "train.gradient_checkpointing", "train.compile", "attention"}
    assert checks.keys() == machine | {"ray", "datasets", "pyarrow", "vLLM"}
    assert code == int(any(check["status"] == "fail" for check in checks.values()))
    assert checks["torch"]["status"] == "ok" and checks["torch"]["found"][0].isdigit()
    assert all(check["advice"] for check in checks.values() if check["status"] != "ok")


def test_the_table_shows_found_and_advice_and_a_failure_exits_1(capsys, monkeypatch):
    ready = [doctor.Check("python", "ok", "3.11"), doctor.Check("ray", "warn", "not installed", "get it")]
    checks = [*ready, doctor.Check("torch", "fail", "gone", "mend it")]
    monkeypatch.setattr(doctor, "all_checks", lambda: checks)
    assert call() == 1
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("✓", "3.11", "!", "get it", "✗", "mend it", "1 of 3 checks failed"))
    monkeypatch.setattr(doctor, "all_checks", lambda: ready)
    assert call() == 0
    assert "Ready, with 1 remark." in capsys.readouterr().out


def test_a_torch_that_cannot_be_imported_is_a_failure_with_its_last_words(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('libgone.so')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = doctor.check_torch()
    assert (check.status, check.found) == ("fail", "ImportError: libgone.so")


def test_how_programs_of_a_model_are_confined_is_said_and_why_not_better(monkeypatch):
    for found, why, status in (("namespaces", "", "ok"), ("landlock", "unshare: no", "ok"), ("none", "seccomp: no", "warn")):
        monkeypatch.setattr(doctor, "confinement", lambda found=found, why=why: (found, why))
        check = doctor.check_sandbox()
        assert check.status == status and check.advice.endswith(why) and (found == "none" or found in check.found.lower())


def test_what_a_run_would_choose_is_said_with_the_reason(monkeypatch):
    monkeypatch.setattr(doctor, "usable_devices", lambda: 0)
    found = {check.name: check.found for check in doctor.check_defaults()}
    assert found["devices"] == "none that torch can use: train ranks and engines compute on the CPU"
    assert found["train.precision"].startswith("float32: train ranks compute on CPUs")
    assert found["train.gradient_checkpointing"].startswith("off: ")
    monkeypatch.setattr(doctor, "usable_devices", lambda: 2)
    monkeypatch.setattr(doctor, "smallest_device", lambda: Device("NVIDIA H100", 80 * 2**30, True))
    found = {check.name: check.found for check in doctor.check_defaults()}
    assert found["devices"] == "1 device for each train rank, 1 device for each engine, of 2 that are visible"
    assert found["train.precision"].startswith("bf16_mixed: NVIDIA H100 computes in bfloat16")
    assert found["train.gradient_checkpointing"].startswith("depends on the size of the model")
    assert found["train.compile"].startswith("false: ") and found["attention"].startswith("torch's flash kernel")


def test_threads_that_spin_are_remarked():
    assert doctor.check_threads("ACTIVE").status == "warn"
    assert doctor.check_threads("").status == "ok"
    assert doctor.check_threads("passive").status == "ok"


def test_a_vllm_environment_is_found_where_it_stands(tmp_path):
    assert doctor.check_vllm(tmp_path).status == "warn"
    (tmp_path / ".venv-vllm" / "bin").mkdir(parents=True)
    (tmp_path / ".venv-vllm" / "bin" / "python").touch()
    assert doctor.check_vllm(tmp_path).status == "ok"


def test_the_command_imports_no_torch():
    code = "import sys, offbeat.cli.doctor, offbeat.cli.config, offbeat.cli.report; sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_settings_are_refused(capsys):
    assert main(["doctor", "--run.name", "x"]) == 2
    assert "doctor takes no settings, got --run.name; check a configuration with offbeat config check" in capsys.readouterr().err


def test_what_the_cpu_multiplies_quickly_is_said() -> None:
    assert doctor.check_cpu(Cpu("Laptop", "AVX2", has_bf16=False)).found == (
        "Laptop, AVX2; products in bfloat16 are many times slower than in float32")
    assert doctor.check_cpu(Cpu("Server", "AMX", has_bf16=True)).found == "Server, AMX; products in bfloat16 are quick"
