"""An installed distribution, as pip leaves it, for tests of entry points."""

from __future__ import annotations

from pathlib import Path


def install(folder: Path, module: str, code: str, entry: str, version: str = "1.2") -> Path:
    """Put a module and its metadata into a folder of sys.path.

    Args:
        folder: made if it is not there.
        module: its name; the distribution's has a dash for each underscore.
        code: the module's source.
        entry: the line of the group `megatron_flex.adapters`, `name = module:finder`.
        version: of the distribution.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = module.replace("_", "-")
    (folder / f"{module}.py").write_text(code, encoding="utf-8")
    info = folder / f"{module}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[megatron_flex.adapters]\n{entry}\n")
    return folder
