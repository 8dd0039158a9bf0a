"""Every dialect says all that the protocol asks for, with the same names of arguments."""

import inspect

import pytest

from offbeat.inference.dialects.base import Dialect
from offbeat.inference.dialects.embedded import EmbeddedDialect
from offbeat.inference.dialects.sglang import SGLangDialect
from offbeat.inference.dialects.vllm import VllmDialect

METHODS = [name for name, member in vars(Dialect).items() if inspect.isfunction(member) and not name.startswith("_")]


@pytest.mark.parametrize("dialect", [EmbeddedDialect, VllmDialect, SGLangDialect])
@pytest.mark.parametrize("method", METHODS)
def test_a_dialect_has_every_method_with_the_same_arguments(dialect: type, method: str) -> None:
    wanted, own = (inspect.signature(getattr(cls, method)).parameters for cls in (Dialect, dialect))
    assert list(own) == list(wanted)
    assert [p.kind for p in own.values()] == [p.kind for p in wanted.values()]
    assert inspect.iscoroutinefunction(getattr(dialect, method))
