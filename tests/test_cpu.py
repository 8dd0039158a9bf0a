"""What is read of a CPU, as Linux describes it, and of the variables that keep torch from its instructions."""

import pytest

from offbeat.cpu import read_cpu

LAPTOP = "processor\t: 0\nmodel name\t: Laptop\nflags\t\t: fpu sse4_1 avx avx2 fma avx_vnni\n"
SKYLAKE = "processor\t: 0\nmodel name\t: Skylake\nflags\t\t: avx avx2 avx512f avx512bw avx512vl\n"
ZEN4 = SKYLAKE.replace("Skylake", "Zen 4").replace("avx512vl", "avx512vl avx512_bf16")
SAPPHIRE = ZEN4.replace("Zen 4", "Sapphire Rapids").replace("avx512_bf16", "avx512_bf16 amx_tile amx_bf16")
GRAVITON2 = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd atomics asimdhp\nCPU implementer\t: 0x41\n"
GRAVITON3 = GRAVITON2.replace("asimdhp", "asimdhp sve bf16 i8mm")


@pytest.mark.parametrize(("described", "instructions", "has_bf16"), [
    (LAPTOP, "AVX2", False), (SKYLAKE, "AVX-512", False), (ZEN4, "AVX-512 with bf16", True), (SAPPHIRE, "AMX", True),
    (GRAVITON2, "NEON", False), (GRAVITON3, "NEON with bf16", True), ("", "SSE", False)])
def test_products_in_bfloat16_are_quick_only_with_instructions_for_them(described: str, instructions: str, has_bf16: bool) -> None:
    found = read_cpu(described, {})
    assert (found.instructions, found.has_bf16, found.mask) == (instructions, has_bf16, "")


@pytest.mark.parametrize(("environ", "instructions", "mask"), [
    ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, "AVX2", "ONEDNN_MAX_CPU_ISA"),
    ({"ONEDNN_MAX_CPU_ISA": "avx512_core"}, "AVX-512", "ONEDNN_MAX_CPU_ISA"),
    ({"ATEN_CPU_CAPABILITY": "avx2"}, "AVX2", "ATEN_CPU_CAPABILITY"), ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, "AMX", ""),
    ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "avx2"}, "AVX2", "ATEN_CPU_CAPABILITY"),
    ({"ATEN_CPU_CAPABILITY": "avx512"}, "AMX", ""), ({"ONEDNN_MAX_CPU_ISA": "DEFAULT"}, "AMX", "")])
def test_what_the_environment_keeps_torch_from_is_not_there(environ: dict[str, str], instructions: str, mask: str) -> None:
    found = read_cpu(SAPPHIRE, environ)
    assert (found.instructions, found.mask, found.has_bf16) == (instructions, mask, instructions == "AMX")
    assert read_cpu(LAPTOP, environ).instructions == "AVX2" and not read_cpu(LAPTOP, environ).mask


def test_it_is_told_in_a_line() -> None:
    assert str(read_cpu(LAPTOP, {})) == "Laptop, AVX2"
    assert str(read_cpu(ZEN4, {"ONEDNN_MAX_CPU_ISA": "AVX2"})) == "Zen 4, AVX2 by ONEDNN_MAX_CPU_ISA"
