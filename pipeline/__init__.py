"""Headroom: the fastest way to train a model in the memory you have, found and proven.

Floors; a module imports only from floors below its own, and the members of a family do not know each other:

    cli  tools                      the command line; what trains nothing
    measure  profiling  searching/  jobs: variants against a baseline; one run looked at; a search in a budget (Optuna)
    compare  planning/              jobs that train nothing: runs of MLflow beside each other; what would fit which card
    publish                         a finished job's report to its readers
    tracking/  report/              Results -> MLflow runs (MLflow); Results -> tables, pictures and a page (matplotlib)
    execute  predict  flops         an Experiment in a clean process -> Result; on fake tensors -> Prediction, FLOPs
    trace  context                  an Experiment on fake tensors -> what would live when; what the CUDA context takes
    profile                         looking closely at one run: tensors and operators
    train                           the loop around the one training step
    step  variants  environment     the step itself; an entry point's YAML -> its variants; what figures depend on
    space                           the configurations that a search or a plan chooses from
    experiment                      settings -> one Experiment, resolved and checked
    settings                        every setting: name, type, default, meaning, and the errors of a wrong one
    techniques/  models/  data/     one file each, found by its name
    text  simulation/               documents -> tokens, once; tensors without numbers that live as real ones do
    sequences  memory/  metrics     tokens -> sequences; budgets, meters, allocator; Result -> figures
    owner                           which process something belongs to, and whether it is gone
    crew                            processes that work on many things side by side
    contracts                       the shapes that all floors agree on
"""
