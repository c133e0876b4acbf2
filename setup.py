"""Everything about the package is in pyproject.toml; this is for tools that still run setup.py."""

from setuptools import setup

setup()
