"""One family of models per file: causal_lm.py holds class CausalLm. There is no list to edit."""
