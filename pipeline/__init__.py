"""Headroom: the fastest way to train a model in the memory you have, found and proven.

Floors; a module imports only from floors below its own, and siblings never import siblings:

    8  cli                              the command line
    7  compare  search/                 jobs: variants against a baseline; a search under a budget (Optuna)
    6  tracking  report/                Results -> MLflow runs (MLflow); Results -> tables and figures (matplotlib)
    5  execute                          an Experiment in a clean process -> Result
    4  train                            the one training step and its loop
    3  experiment                       YAML + overrides -> Experiment (YAML)
    2  techniques/  models/  data/      one file each, found by its name
    1  text  memory/  metrics           tokens and sequences; budgets and meters; Result -> figures
    0  contracts                        the shapes all floors agree on
"""
