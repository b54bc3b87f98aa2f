"""Finds the packages under each mapped folder; everything else about the build is in pyproject.toml."""

import tomllib
from pathlib import Path

from setuptools import find_packages, setup

PYPROJECT = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = PYPROJECT["tool"]["setuptools"]["package-dir"]

setup(
    packages=[
        name for root, folder in FOLDERS.items() for name in (root, *(f"{root}.{sub}" for sub in find_packages(folder)))
    ]
)
