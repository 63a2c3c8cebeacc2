# SPDX-License-Identifier: Apache-2.0
"""Registrations wait for the import of another package, whatever asks for it before."""

import functools
import importlib
import importlib.util
import itertools
import runpy
import sys
from importlib.machinery import SourceFileLoader
from typing import Any

import pytest

from fused_layernorm.integrations.after_import import after_import

NAMES = (f"waited_for_{i}" for i in itertools.count())
BOTH = [("first", 1), ("second", 1)]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The name of a package that nobody has imported, whose file is `<name>/__init__.py`."""
    name = next(NAMES)
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("value = 1\n")
    (tmp_path / name / "__main__.py").write_text("ran = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


@pytest.fixture
def calls(package):
    """What was seen at each call of two functions that wait for the package."""
    found: list[Any] = []
    for who in ("first", "second"):
        see = functools.partial(lambda who: found.append((who, sys.modules[package].value)), who)
        after_import(package, see, who)
    assert found == []
    return found


def test_after_the_import_and_once(package, calls):
    """Also if somebody has looked for it, as libraries do to see whether another is installed."""
    for _ in range(2):
        spec: Any = importlib.util.find_spec(package)
        assert spec.origin.endswith("__init__.py")
        assert "value" in spec.loader.get_source(package)
    assert calls == []
    module: Any = importlib.import_module(package)
    assert calls == BOTH
    assert type(module.__loader__) is SourceFileLoader
    assert module.__spec__.loader is module.__loader__
    importlib.reload(module)
    assert calls == BOTH
    after_import(package, lambda: calls.append("now"), "no")
    assert calls == [*BOTH, "now"]


def test_what_is_run_or_not_there(package):
    for name in (f"{package}.__main__", f"{package}_missing"):
        after_import(name, lambda: None, "no")
    assert runpy.run_module(package)["ran"]
    assert importlib.util.find_spec(f"{package}_missing") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{package}_missing")


def test_after_an_import_that_failed(package, calls, tmp_path):
    source = tmp_path / package / "__init__.py"
    source.write_text("raise ImportError('not yet')\n")
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module(package)
    assert calls == []
    source.write_text("value = 1  # now\n")
    importlib.invalidate_caches()
    importlib.import_module(package)
    assert calls == BOTH


def test_an_error_becomes_a_warning(package):
    def fail():
        raise LookupError

    after_import(package, fail, "it is not told")
    with pytest.warns(UserWarning, match=r"^it is not told: LookupError"):
        importlib.import_module(package)
