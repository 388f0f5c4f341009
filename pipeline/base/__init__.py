"""What all other folders build on: contracts, results, units, files and user functions."""
