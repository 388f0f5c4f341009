"""One family of models a file: causal_lm.py holds class CausalLm. There is no list to edit."""
