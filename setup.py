"""Everything about the package is in pyproject.toml, but for the description that a package index shows."""

import re
from pathlib import Path

from setuptools import setup


def describe() -> str:
    """README.md without what an index cannot resolve: pictures, and links to files of the repository."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^]]*\]\((?!https://)[^)]*\)\n*|<!--.*?-->\n*", "", text)
    return re.sub(r"\[([^]]*)\]\((?!https://)[^)]*\)", r"\1", text)


setup(long_description=describe(), long_description_content_type="text/markdown")
