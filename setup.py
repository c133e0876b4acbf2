"""What the package is and needs; the tools are configured in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_version() -> str:
    """The version, read as text: building the package must not need torch."""
    source = (ROOT / "megatron_flex" / "version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if found is None:
        raise ValueError('megatron_flex/version.py must hold a line of the form __version__ = "1.2.3"')
    return found[1]


setup(
    name="megatron-flex",
    version=read_version(),
    description="Read, edit, measure and dump the unsharded activations of models trained with Megatron-LM",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_flex*"]),
    package_data={"megatron_flex": ["py.typed", "page/assets/*"]},
    # tqdm: progress bars. xxhash: the checksums of dumps, at several times the speed of what Python has.
    install_requires=["torch>=2.4", "tqdm>=4.66", "xxhash>=3.1"],
    extras_require={
        # megatron-core, and what its training code imports but its package does not ask for:
        # psutil for checkpoints, einops for Mamba and process grids, the others for its tokenizers,
        # arguments and configs (which of them depends on the version).
        "megatron": ["megatron-core>=0.12.3", "einops", "psutil", "pydantic", "pyyaml", "regex", "six"],
        "fairscale": ["fairscale==0.4.13"],
        # What converts weights (load_hf, to_hf), and prepares or builds models that are hooked in tests; the
        # adapters do without.
        "huggingface": ["accelerate>=1.10", "safetensors>=0.5", "transformers>=5"],
        # Converts what the table of load_hf lacks, where Transformer Engine is.
        "mcore-bridge": ["mcore-bridge>=1.6,<2"],
        # Built from its sources in a few seconds, with neither torch nor a compiler at hand.
        "deepspeed": ["deepspeed==0.19.8"],
        # What caches are compared with in tests; TransformerLens 4 has no HookedTransformer any more.
        "lens-proof": ["transformer-lens>=3.9,<4", "transformers>=5.9"],
        # The command line, and what `megatron-flex dump export` writes beside safetensors.
        "cli": ["numpy", "rich>=13", "typer>=0.15"],
        # Flags and YAML on existing launchers.
        "launch": ["pydantic>=2", "pyyaml"],
        # What scripts/patch_upstream finds its anchors with.
        "patches": ["libcst"],
        # Statistics in Parquet; JSON lines need nothing.
        "parquet": ["pyarrow"],
        # What megatron_flex.plot and scripts/bench --hooks draw with.
        "plot": ["matplotlib>=3.10"],
        # Pages in headless Chromium, which the system has: none is downloaded.
        "browser": ["numpy", "pillow", "playwright>=1.50"],
        "zarr": ["numpy", "zarr>=3"],
        "datasets": ["datasets>=4", "numpy"],
        # A notebook that tests run.
        "notebook": ["ipykernel", "nbclient"],
        # The site of the documents: scripts/docs.
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.8,<10", "mkdocstrings[python]>=1"],
        "dev": [
            "hypothesis",
            "mypy",
            "pytest>=8",
            "pytest-timeout",
            "pytest-xdist",
            "filelock",
            "rich",
            "ruff",
            "safetensors",
            "tensorboard",
            "types-PyYAML",
        ],
    },
    entry_points={"console_scripts": ["megatron-flex=megatron_flex.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
