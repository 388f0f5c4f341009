"""Builds the packages: fitproof, pipeline with experiments/ as its folder pipeline/experiments, and pytest's plugin."""

from setuptools import find_packages, setup

setup(
    py_modules=["pytest_fitproof"],
    packages=[*find_packages(include=["fitproof", "pipeline*"]), "pipeline.experiments"],
    package_dir={"pipeline.experiments": "experiments"},
)
