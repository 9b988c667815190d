import importlib.metadata
import importlib.util
import sys

import pytest

from fisher_lit import optional_packages
from fisher_lit.optional_packages import hide_broken_packages


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Makes a package that is installed and runs some code when it is imported; everything is undone afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(optional_packages, "_HIDDEN", optional_packages._Hidden())
    names = []

    def make(name, code):
        names.append(name)
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(code)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        importlib.invalidate_caches()

    yield make
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("error", ["ImportError", "OSError", "RuntimeError"])
def test_a_package_that_does_not_load_looks_uninstalled(installed, error):
    installed("brokenpackage", f"raise {error}('operator does not exist')")
    assert importlib.util.find_spec("brokenpackage") is not None
    assert hide_broken_packages(["brokenpackage", "notinstalledatall"]) == ["brokenpackage"]
    with pytest.raises(ModuleNotFoundError):
        import brokenpackage  # noqa: F401
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("brokenpackage")


def test_a_package_that_loads_stays(installed):
    installed("soundpackage", "answer = 42")
    assert hide_broken_packages(["soundpackage"]) == []
    import soundpackage

    assert soundpackage.answer == 42
    assert importlib.metadata.version("soundpackage") == "1.0"
