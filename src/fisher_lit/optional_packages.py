"""Installed packages that do not load are treated as not installed.

vLLM's CPU wheels bring torchvision, torchaudio and torchcodec. Next to a torch of another build their compiled parts
do not load, and transformers and torchmetrics, which import them if they are there, fail with them. Nothing here
uses them.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from importlib.metadata import DistributionFinder, PackageNotFoundError

OPTIONAL_PACKAGES = ("torchvision", "torchaudio", "torchcodec")


class _Hidden(DistributionFinder):
    """Tells `importlib.metadata` that some packages are not installed."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, fullname, path=None, target=None):
        return None

    def find_distributions(self, context=DistributionFinder.Context()):  # noqa: B008
        if context.name in self.names:
            raise PackageNotFoundError(context.name)
        return iter(())


_HIDDEN = _Hidden()


def hide_broken_packages(names: Iterable[str] = OPTIONAL_PACKAGES) -> list[str]:
    """Make packages whose import fails look as if they were not installed, in this process.

    Call it before transformers, torchmetrics, lightning or vllm are imported. The command line does.

    Args:
        names: packages to try; those that are not installed are left alone.

    Returns:
        The names that are hidden.
    """
    for name in names:
        if name in sys.modules or importlib.util.find_spec(name) is None:
            continue
        try:
            importlib.import_module(name)
        except (ImportError, OSError, RuntimeError):
            for loaded in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
                del sys.modules[loaded]
            # `find_spec` then answers "not found", and an import raises ModuleNotFoundError.
            sys.modules[name] = None  # type: ignore[assignment]
            _HIDDEN.names.add(name)
    if _HIDDEN.names and _HIDDEN not in sys.meta_path:
        sys.meta_path.insert(0, _HIDDEN)
    return sorted(_HIDDEN.names)
