"""Builds the package: the folders of pipeline/, and experiments/, which becomes its folder pipeline/experiments."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["pipeline*"]), "pipeline.experiments"],
    package_dir={"pipeline.experiments": "experiments"},
)
