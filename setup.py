"""Builds the packages: fitproof, and pipeline with experiments/, which becomes its folder pipeline/experiments."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["fitproof", "pipeline*"]), "pipeline.experiments"],
    package_dir={"pipeline.experiments": "experiments"},
)
