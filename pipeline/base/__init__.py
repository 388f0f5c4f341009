"""What all other folders build on: contracts, results, units, files, tokenizing and user functions."""
